"""`./inv cluster.sync`: sends the head's model and image to the other nodes over the link.

rsync sends the files: it compares checksums, sends only the differences, and resumes interrupted transfers. `docker
save` and `docker load` send the image.
"""

import getpass
import re
import shlex
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.errors import (
    InputError,
    IntegrityError,
    NetworkError,
    ProcessError,
    SparkforgeError,
    StorageError,
    UsageError,
)
from sparkforge.core.process import run
from sparkforge.image import trust
from sparkforge.models.hub import MODEL_FILES
from sparkforge.serve.cluster import probe, remote
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode

SEND_SECONDS = 6 * 3600.0  # for 65 GB over a link of 10 GB/s, or over a cable of 1 Gb/s
FLUSH_SECONDS = 3600.0
SILENT_SECONDS = 60  # until rsync ends a silent connection; it sends keepalives while it hashes
RESUME = "./inv cluster.sync   # it resumes the transfer"
# The files that vLLM reads and cluster.check compares.
PATTERNS = (*MODEL_FILES, *(f"*{suffix}" for suffix in probe.COMPARED))
# A partial or damaged file is repaired in place with the bytes that differ; parent folders are created.
RSYNC = (
    "rsync", "--dirs", "--times", "--copy-links", "--inplace", "--no-whole-file", "--checksum", "--mkpath", "--fsync",
    "--out-format=%n", "--exclude=*/", *(f"--include={pattern}" for pattern in PATTERNS), "--exclude=*",
)  # fmt: skip
RSYNC_VERSION = "3.2.4"  # the first version with --fsync; --mkpath came with 3.2.3
INSTALL = "sudo apt update && sudo apt install rsync"  # also upgrades an installed rsync


def send_model(config: ClusterConfig, model: str = "", *, dry_run: bool = False) -> None:
    """Copy the model's folder from the head to every other node.

    A missing folder is created only when all its files are complete. Raises UsageError if no model is named, InputError
    for a folder without a model, and the errors of `sending_error`. The same command resumes an interrupted transfer.
    """
    folder, head = model or config.model, config.head
    if not folder:
        fix = "--model /models/gpt-oss-120b   # or model in cluster.toml"
        raise UsageError("no model is named", "cluster.toml names none", fix)
    if not folder.startswith("/"):  # a relative path differs on each node, and no shell expands a ~
        fix = f"--model {shlex.quote(str(paths.typed(folder).absolute()))}   # or model in cluster.toml"
        raise UsageError(f"the model {folder} is not an absolute path", "it names a folder on every node", fix)
    try:
        remote.output(head, ["sh", "-c", 'cd "$0" && ls config.json *.safetensors', folder], seconds=SILENT_SECONDS)
    except ProcessError as error:
        why = f"{folder} has no config.json with safetensors beside it"
        raise InputError(
            f"{head.name} has no such model", why, "./inv pull gpt-oss-120b   # on the head", code="input.model"
        ) from error
    remote.on_every(config.workers, lambda node: _send_files(head, node, folder, dry_run=dry_run))


def _send_files(head: ClusterNode, node: ClusterNode, folder: str, *, dry_run: bool) -> None:
    collected = str(Path(folder).with_name(f".{Path(folder).name}.sparkforge-sync"))
    there = ["sh", "-c", 'if test -d "$0"; then echo whole; fi', folder]
    whole = bool(remote.output(node, there, seconds=SILENT_SECONDS).strip())
    shell, login = ssh_command(node)
    argv = [*RSYNC, *(["--dry-run"] if dry_run else []), "--protect-args", f"--timeout={SILENT_SECONDS}"]
    argv += [f"--rsh={shlex.join(shell)}", f"{folder}/", f"{login}:{folder if whole else collected}/"]
    try:
        names = [name for name in remote.output(head, argv, seconds=SEND_SECONDS).splitlines() if name != "./"]
    except ProcessError as error:
        raise sending_error(error, head, node) from error
    if dry_run:
        say(f"{node.name}: would get {', '.join(names) or 'nothing'}")
        return
    if not whole:
        # An earlier run may have ended with complete files that rsync had not yet flushed to the disk.
        commands = (
            ["sync", "-f", "--", collected],
            ["mv", "-T", "--", collected, folder],
            ["sync", "--", str(Path(folder).parent)],
        )
        remote.output(node, ["sh", "-c", " && ".join(map(shlex.join, commands))], seconds=FLUSH_SECONDS)
    say(f"{node.name}: {f'got {len(names)} files' if names else 'has every file already'}")


def ssh_command(node: ClusterNode) -> tuple[list[str], str]:
    """Return the ssh command with which the head reaches a node over the link, and its login.

    User, key and port are those of `ssh NODE`. The host key is that of the host name in this ssh configuration.
    """
    command = [*remote.SSH, "-o", "UpdateHostKeys=no"]
    if not node.ssh:
        return command, f"{getpass.getuser()}@{node.address}"
    settings = run(["ssh", "-G", node.ssh], seconds=SILENT_SECONDS).stdout.splitlines()
    host = next(line.partition(" ")[2] for line in settings if line.startswith("hostname "))
    return [*command, "-o", f"HostKeyAlias={host}", "-o", f"HostName={node.address}"], node.ssh


def sending_error(error: ProcessError, head: ClusterNode, node: ClusterNode) -> SparkforgeError:
    """Return the error that the output of rsync, ssh or docker describes; its last line rarely has the cause."""
    commands = (f"ssh -t {n.ssh} {shlex.quote(INSTALL)}" if n.ssh else INSTALL for n in (head, node))
    on_both = " && ".join((*commands, RESUME))
    meanings: tuple[tuple[str, type[SparkforgeError], str, str, str], ...] = (
        ("No space left on device|Disk quota exceeded", StorageError, f"the disk of {node.name} is full",
         f"free some there, then {RESUME}", "storage.full"),
        (r"(?:rsync|docker): (?:command )?not found|No such file or directory: '(?:rsync|docker)'", ProcessError,
         "rsync or docker is missing", on_both, "process.failed"),
        (r"unknown option|unrecognized option", ProcessError,
         f"rsync of {head.name} or of {node.name} is older than {RSYNC_VERSION}", on_both, "process.failed"),
        (r"(?:failed|error): (?:Permission denied|Read-only file system) \(", StorageError,
         f"{node.name} cannot write the model's folder", f"on {node.name}: ls -ld its parent", "storage.access"),
        (r"Host key verification failed|Permission denied \(", NetworkError,
         f"the head cannot log in on {node.name} at {node.address}", f"ssh-copy-id {node.ssh}   # on the head",
         "network.node"),
        ("", NetworkError, f"sending to {node.name} was cut off", RESUME, "network.node"),
    )  # fmt: skip
    pattern, kind, failure, fix, code = next(meaning for meaning in meanings if re.search(meaning[0], error.why))
    lines = error.why.splitlines()
    first = next((index for index, line in enumerate(lines) if pattern and re.search(pattern, line)), -3)
    return kind(failure, " ".join(lines[first:][:3]), fix, code=code)


def send_image(config: ClusterConfig, *, dry_run: bool = False) -> None:
    """Load the head's image on every other node with no image or another one, and compare the ids.

    Raises UsageError on the embedded device, InputError if the head has no image, the errors of `sending_error`, and
    IntegrityError if a node then has another image, or trust.toml refuses the image.
    """
    if not config.in_containers:
        raise UsageError("there is no image to send", f"device {config.device} has none", "without --image")
    name = f"sparkforge/vllm:{config.stack}"
    wanted = image_id(config.head, name)
    if not wanted:
        why, fix = "docker lists none", "./inv build --engine docker   # on the head"
        raise InputError(f"{config.head.name} has no image {name}", why, fix)
    if trust.is_demanding():
        if config.head.ssh:
            why = "trust.toml requires signatures, which are checked where the image is"
            raise UsageError("this machine is not the head", why, "./inv cluster.sync --image   # on the head")
        trust.print_trust(config.stack, wanted)
    for node in config.workers:
        if image_id(node, name) == wanted:
            say(f"{node.name}: has {name} already, {wanted[:19]}")
            continue
        say(f"{node.name}: gets {name}, {wanted[:19]}")
        if dry_run:
            continue
        shell, login = ssh_command(node)
        pipe = f"docker save {shlex.quote(name)} | {shlex.join([*shell, login])} docker load"
        try:
            remote.output(config.head, ["bash", "-o", "pipefail", "-c", pipe], seconds=SEND_SECONDS)
        except ProcessError as error:
            raise sending_error(error, config.head, node) from error
        if (loaded := image_id(node, name)) != wanted:
            why = f"{name} is {loaded or 'not there'} after docker load, and {wanted} on {config.head.name}"
            fix = (
                "./inv image.pull --help   # there; or give both Docker engines the same image store "
                "(docker info, Storage Driver)"
            )
            raise IntegrityError(f"{node.name} has another image", why, fix, code="integrity.image")


def image_id(node: ClusterNode, name: str) -> str:
    """Return an image's id on a node; empty if the image is missing. Raises the errors of `remote.output`."""
    argv = ["docker", "image", "ls", "--no-trunc", "--format", "{{.ID}}", name]
    return next(iter(remote.output(node, argv, seconds=SILENT_SECONDS).splitlines()), "")
