"""`./inv cluster.sync`: the head's model and image go to the other nodes over the link, checked by their hashes.

rsync sends the files: it goes on where it was cut off, and sends only what differs. docker sends the image.
"""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

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
from sparkforge.core.tables import Record, parse_object
from sparkforge.image import trust
from sparkforge.models.hub import WANTED
from sparkforge.models.hub_source import NOTE, Note
from sparkforge.serve.cluster import probe, remote
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode

SEND_SECONDS = 6 * 3600.0  # of 65 GB over a link of 10 GB/s, or over a cable of 1 Gb/s
HASH_SECONDS = 3600.0
SILENT_SECONDS = 60  # until rsync gives up a connection that says nothing
RESUME = "./inv cluster.sync   # it goes on where it was"
# A file that is there in part or damaged is mended in place, with the bytes that differ; parents are made.
RSYNC = ("rsync", "--times", "--copy-links", "--inplace", "--no-whole-file", "--ignore-times", "--mkpath", "--fsync")
RSYNC_VERSION = "3.2.4"  # the first one with --fsync; --mkpath is of 3.2.3
INSTALL = "sudo apt update && sudo apt install rsync"  # upgrades one that is there


class FileSum(Record):
    """A file's size in bytes and its sha256; empty where it was not computed, as for one of another size."""

    size: int
    sha256: str


class NodeFiles(Record):
    """What a node has of a model. `path` is the folder itself if it is `whole`, else where it is collected."""

    files: Mapping[str, FileSum] = Field(default_factory=dict)
    path: str = ""
    whole: bool = False
    free: int = 0
    error: str = ""

    def size(self, name: str) -> int:
        """Return the bytes of a file that are there."""
        return self.files[name].size if name in self.files else 0


def send_model(config: ClusterConfig, model: str = "", *, dry_run: bool = False) -> None:
    """Make the model's folder on every other node what it is on the head.

    A folder that is not there appears when all its files have the head's hashes. Raises UsageError without a model,
    InputError for a folder without one, StorageError where there is no room, IntegrityError, and NetworkError for a
    transfer that was cut off, which the same command resumes.
    """
    folder, head = model or config.model, config.head
    if not folder:
        fix = "./inv cluster.sync --model /models/gpt-oss-120b, or model in cluster.toml"
        raise UsageError("no model is named", "cluster.toml names none", fix)
    if not folder.startswith("/"):  # it would be relative to another folder on each node, and no shell expands a ~
        fix = f'model = "{paths.typed(folder).absolute()}"   # in cluster.toml'
        raise UsageError(f"the model {folder} is no absolute path", "it names a folder on every node", fix)
    text = remote.output(head, ["sh", "-c", 'cat "$0" 2>/dev/null || true', f"{folder}/{NOTE}"], seconds=HASH_SECONDS)
    # Sums of a model that was fetched are in its note.
    noted = Note.model_validate(parse_object(text, f"{NOTE} of {head.name}", Note)).files if text.strip() else {}
    head_files = _list(head, folder, known={name: file.sha256 for name, file in noted.items()})
    names = head_files.files.keys()
    if not head_files.whole or "config.json" not in names or not any(n.endswith(".safetensors") for n in names):
        why = f"{folder} has no config.json with safetensors beside it"
        raise InputError(f"{head.name} has no such model", why, "./inv pull, on the head", code="input.model")
    total = sum(file.size for file in head_files.files.values())
    say(f"{head.name} has {len(names)} files of {Path(folder).name}, {total / 1e9:.2f} GB")
    remote.on_every(config.workers, lambda node: _send_files(head, node, folder, head_files, dry_run=dry_run))


def _send_files(head: ClusterNode, node: ClusterNode, folder: str, head_files: NodeFiles, *, dry_run: bool) -> None:
    sizes = {name: file.size for name, file in head_files.files.items()}

    def look() -> tuple[NodeFiles, list[str]]:
        there = _list(node, folder, sizes=sizes)
        return there, [name for name, file in head_files.files.items() if there.files.get(name) != file]

    node_files, names = look()
    extra = [name for name in node_files.files if name not in sizes and name.endswith(probe.COMPARED)]
    if extra:
        why = f"{', '.join(extra)} in {node_files.path}: cluster.check compares these too"
        fix = f"remove it on that node: cd {shlex.quote(node_files.path)} && rm {shlex.join(extra)}; then {RESUME}"
        raise InputError(f"{node.name} has files that the head lacks", why, fix, code="input.model")
    missing = sum(max(0, sizes[name] - node_files.size(name)) for name in names)
    if not names and node_files.whole:
        say(f"{node.name}: has every file already")
        return
    say(f"{node.name}: {len(names)} files differ, {missing / 1e9:.2f} GB more are needed there")
    if dry_run:
        return
    if missing > node_files.free:
        parent, free = Path(node_files.path).parent, node_files.free / 1e9
        why = f"{parent} has {free:.2f} GB free, {missing / 1e9:.2f} GB are needed"
        fix = f"free some there, then {RESUME}"
        raise StorageError(f"not enough room on {node.name}", why, fix, code="storage.full")
    for _ in ("send", "send again"):
        _rsync(head, node, names, (folder, node_files.path))
        _, names = look()
        if not names:
            break
        say(f"{node.name}: {', '.join(names)} came with other bytes")
    else:
        why = f"{', '.join(names)} has another sha256 than {NOTE} or the file on {head.name}"
        fix = f"check the model on {head.name}: ./inv pull; then {RESUME}"
        raise IntegrityError(f"{node.name} did not get the head's files", why, fix, code="integrity.hash")
    if not node_files.whole:
        # An earlier run may have been cut off when the files were complete, before rsync had flushed them to the disk.
        commands = (
            ["sync", "-f", "--", node_files.path],
            ["mv", "-T", "--", node_files.path, folder],
            ["sync", "--", str(Path(folder).parent)],
        )
        remote.output(node, ["sh", "-c", " && ".join(map(shlex.join, commands))], seconds=HASH_SECONDS)
    say(f"{node.name}: has every file, each with the head's sha256")


def _list(node: ClusterNode, folder: str, **more: Any) -> NodeFiles:
    """Return what a node has of a model. Raises StorageError for a folder that cannot be read."""
    patterns = [*WANTED, *(f"*{suffix}" for suffix in probe.COMPARED)]
    files = remote.ask_probe(node, "list", NodeFiles, seconds=HASH_SECONDS, folder=folder, patterns=patterns, **more)
    if files.error:
        fix = f"on {node.name}: ls -ld {shlex.quote(folder)}"
        raise StorageError(f"{node.name} cannot use the model's folder", files.error, fix, code="storage.access")
    return files


def ssh_command(node: ClusterNode) -> tuple[list[str], str]:
    """Return the ssh command with which the head reaches a node at the link, and whom it logs in as.

    User, key and port are those of `ssh NODE`; the host key is the one that is known by that name.
    """
    command = [*remote.SSH, "-o", "UpdateHostKeys=no"]
    if not node.ssh:
        return command, f"{getpass.getuser()}@{node.address}"
    settings = run(["ssh", "-G", node.ssh], seconds=SILENT_SECONDS).stdout.splitlines()
    host = next(line.partition(" ")[2] for line in settings if line.startswith("hostname "))
    return [*command, "-o", f"HostKeyAlias={host}", "-o", f"HostName={node.address}"], node.ssh


def _rsync(head: ClusterNode, node: ClusterNode, names: Sequence[str], folders: tuple[str, str]) -> None:
    """Send files of the first folder, on the head, to the second, on a node. Raises what `sending_error` returns."""
    if not names:
        return
    shell, login = ssh_command(node)
    argv = [*RSYNC, "--protect-args", f"--timeout={SILENT_SECONDS}", "--files-from=-", f"--rsh={shlex.join(shell)}"]
    try:
        remote.output(
            head,
            [*argv, f"{folders[0]}/", f"{login}:{folders[1]}/"],
            seconds=SEND_SECONDS,
            stdin="\n".join(names) + "\n",
        )
    except ProcessError as error:
        raise sending_error(error, head, node) from error


def install_command(node: ClusterNode) -> str:
    """Return what the user types here to have the newest rsync of a node's distribution there."""
    return f"ssh -t {node.ssh} {shlex.quote(INSTALL)}" if node.ssh else INSTALL


def sending_error(error: ProcessError, head: ClusterNode, node: ClusterNode) -> SparkforgeError:
    """Return what rsync's, ssh's or docker's messages mean.

    rsync says "on remote machine" of an option that the node does not know. Its last lines say only that the
    connection ended.
    """
    on_head, on_node = (f"{install_command(machine)} && {RESUME}" for machine in (head, node))
    on_both = f"{install_command(head)} && {on_node}"
    meanings: tuple[tuple[str, type[SparkforgeError], str, str, str], ...] = (
        ("No space left on device|Disk quota exceeded", StorageError, f"the disk of {node.name} is full",
         f"free some there, then {RESUME}", "storage.full"),
        (r"(?:rsync|docker): (?:command )?not found|No such file or directory: '(?:rsync|docker)'", ProcessError,
         "rsync or docker is missing", on_both, "process.failed"),
        (r"on remote machine: \S+: unknown option", ProcessError, f"rsync of {node.name} is older than {RSYNC_VERSION}",
         on_node, "process.failed"),
        (r"rsync: \S+: unknown option", ProcessError, f"rsync of {head.name} is older than {RSYNC_VERSION}", on_head,
         "process.failed"),
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
    """Load the head's image on every other node that has none, or another one, and compare the ids.

    Raises UsageError on the embedded device, InputError if the head has no image, NetworkError, and IntegrityError for
    another image there, or one that trust.toml does not take.
    """
    if not config.in_containers:
        raise UsageError("there is no image to send", f"device {config.device} has none", "leave --image out")
    name = f"sparkforge/vllm:{config.stack}"
    wanted = image_id(config.head, name)
    if not wanted:
        raise InputError(f"{config.head.name} has no image {name}", "docker lists none", "./inv build, on the head")
    if trust.is_demanding():
        if config.head.ssh:
            why = "trust.toml demands signatures, and they are looked for where the image is"
            raise UsageError("this machine is not the head", why, "./inv cluster.sync --image, on the head")
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
            fix = "the same image store in both Docker engines (docker info, Storage Driver), or ./inv image.pull there"
            raise IntegrityError(f"{node.name} has another image", why, fix, code="integrity.image")


def image_id(node: ClusterNode, name: str) -> str:
    """Return an image's id on a node; empty if it is not there. Raises what `remote.output` raises for no docker."""
    argv = ["docker", "image", "ls", "--no-trunc", "--format", "{{.ID}}", name]
    return next(iter(remote.output(node, argv, seconds=SILENT_SECONDS).splitlines()), "")
