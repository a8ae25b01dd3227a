"""`./inv cluster.sync`: the head's model and image go to the other nodes over the link, checked by their hashes.

rsync sends the files: it goes on where it was cut off, and sends only what differs. docker sends the image.
"""

from __future__ import annotations

import getpass
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.documents import parse_json
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
from sparkforge.core.tables import Record
from sparkforge.models.hub import WANTED
from sparkforge.models.hub_source import NOTE
from sparkforge.serve.cluster import probe, remote, sums
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode

SEND_SECONDS = 6 * 3600.0  # of 65 GB over a link of 10 GB/s, or over a cable of 1 Gb/s
HASH_SECONDS = 3600.0
SILENT_SECONDS = 60  # until rsync gives up a connection that says nothing
AGAIN = "./inv cluster.sync   # it goes on where it was"
# A file that is shorter is continued; one of another content is mended in place.
TAIL, MEND = ("--append-verify",), ("--inplace", "--no-whole-file", "--ignore-times")


class FileSum(Record):
    """A file's size in bytes and its sha256; empty where it was not computed, as for one of another size."""

    size: int
    sha256: str


class NodeFiles(Record):
    """What a node has of a model. `path` is the folder itself if it is `whole`, else where it is collected."""

    files: Mapping[str, FileSum] = Field(default_factory=dict)
    path: str
    whole: bool
    free: int


def send_model(config: ClusterConfig, model: str = "", *, dry_run: bool = False) -> None:
    """Make the model's folder on every other node what it is on the head.

    A folder that is not there appears when all its files have the head's hashes. Raises UsageError without a model,
    InputError for a folder without one, StorageError where there is no room, IntegrityError, and NetworkError for a
    transfer that was cut off, which the same command resumes.
    """
    folder = model or config.model
    if not folder:
        fix = "./inv cluster.sync --model /models/gpt-oss-120b, or model in cluster.toml"
        raise UsageError("no model is named", "cluster.toml names none", fix)
    if not folder.startswith("/"):  # it would be relative to another folder on each node, and no shell expands a ~
        fix = f'model = "{paths.typed(folder).absolute()}"   # in cluster.toml'
        raise UsageError(f"the model {folder} is no absolute path", "it names a folder on every node", fix)
    head_files = _head_files(config.head, folder)
    total = sum(file.size for file in head_files.files.values())
    say(f"{config.head.name} has {len(head_files.files)} files of {Path(folder).name}, {total / 1e9:.2f} GB")
    remote.on_every(config.workers, lambda node: _send_files(config.head, node, folder, head_files, dry_run=dry_run))


def _head_files(head: ClusterNode, folder: str) -> NodeFiles:
    """Return the head's files; sums of a model that was fetched are in its note."""
    note = remote.output(head, ["sh", "-c", 'cat "$0" 2>/dev/null || true', f"{folder}/{NOTE}"], seconds=HASH_SECONDS)
    known = {}
    if note.strip():
        entries = parse_json(note, f"{NOTE} of {head.name}").get("files", {})
        known = {name: str(entry.get("sha256", "")) for name, entry in entries.items()}
    files = _list(head, folder, known=known)
    if not files.whole or "config.json" not in files.files or not any(n.endswith(".safetensors") for n in files.files):
        why = f"{folder} has no config.json with safetensors beside it"
        raise InputError(f"{head.name} has no such model", why, "./inv model.fetch, on the head", code="input.model")
    return files


def _send_files(head: ClusterNode, node: ClusterNode, folder: str, head_files: NodeFiles, *, dry_run: bool) -> None:
    sizes = {name: file.size for name, file in head_files.files.items()}
    node_files = _list(node, folder, sizes=sizes)
    different = _different(head_files, node_files)
    _refuse_others(node, head_files, node_files)
    missing = sum(max(0, sizes[name] - _size(node_files, name)) for name in different)
    if not different and node_files.whole:
        say(f"{node.name}: has every file already")
        return
    say(f"{node.name}: {len(different)} files differ, {missing / 1e9:.2f} GB more are needed there")
    if dry_run:
        return
    if missing > node_files.free:
        why = (
            f"{Path(node_files.path).parent} has {node_files.free / 1e9:.2f} GB free, {missing / 1e9:.2f} GB are needed"
        )
        raise StorageError(
            f"not enough room on {node.name}", why, f"free some there, then {AGAIN}", code="storage.full"
        )
    _program(node, {"mode": "stage", "folder": folder})
    shell, login = ssh_command(node)
    destination = f"{login}:{node_files.path}/"
    tails = [name for name in different if _size(node_files, name) < sizes[name]]
    _rsync(head, node, shell, TAIL, tails, f"{folder}/", destination)
    _rsync(head, node, shell, MEND, [name for name in different if name not in tails], f"{folder}/", destination)
    if different := _different(head_files, _list(node, folder, sizes=sizes)):
        say(f"{node.name}: {', '.join(different)} came with other bytes, and is sent again")
        _rsync(head, node, shell, MEND, different, f"{folder}/", destination)
        if different := _different(head_files, _list(node, folder, sizes=sizes)):
            why = f"{', '.join(different)} has another sha256 than {NOTE} or the file on {head.name}"
            fix = f"check the model on {head.name}: ./inv model.fetch; then {AGAIN}"
            raise IntegrityError(f"{node.name} did not get the head's files", why, fix, code="integrity.hash")
    _program(node, {"mode": "keep", "folder": folder})
    say(f"{node.name}: has every file, each with the head's sha256")


def _different(head_files: NodeFiles, node_files: NodeFiles) -> list[str]:
    return [name for name, file in head_files.files.items() if node_files.files.get(name) != file]


def _refuse_others(node: ClusterNode, head_files: NodeFiles, node_files: NodeFiles) -> None:
    """Raise InputError for files that the head lacks and that `cluster.check` compares."""
    if others := sorted(
        name for name in node_files.files.keys() - head_files.files.keys() if name.endswith(probe.COMPARED)
    ):
        why = f"{', '.join(others)} in {node_files.path}: cluster.check compares these too"
        fix = f"remove it on that node: cd {shlex.quote(node_files.path)} && rm {shlex.join(others)}; then {AGAIN}"
        raise InputError(f"{node.name} has files that the head lacks", why, fix, code="input.model")


def _size(files: NodeFiles, name: str) -> int:
    return files.files[name].size if name in files.files else 0


def _list(node: ClusterNode, folder: str, **more: Any) -> NodeFiles:
    patterns = [*WANTED, *(f"*{suffix}" for suffix in probe.COMPARED)]
    options = {"mode": "list", "folder": folder, "patterns": patterns, **more}
    return NodeFiles.model_validate(_program(node, options))


def _program(node: ClusterNode, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run sums.py on a node. Raises StorageError for a folder that cannot be read or made."""
    source = Path(sums.__file__).read_text(encoding="utf-8")
    answer = remote.program(node, source, options, seconds=HASH_SECONDS)
    if error := answer.get("error"):
        fix = f"on {node.name}: ls -ld {shlex.quote(str(options['folder']))}"
        raise StorageError(f"{node.name} cannot use the model's folder", error, fix, code="storage.access")
    return dict(answer)


def ssh_command(node: ClusterNode) -> tuple[list[str], str]:
    """Return the ssh command with which the head reaches a node at the link, and whom it logs in as.

    User, key and port are those of `ssh NODE`; the host key is the one that is known by that name.
    """
    command = ["ssh", *(word for option in remote.OPTIONS for word in ("-o", option)), "-o", "UpdateHostKeys=no"]
    if not node.ssh:
        return command, f"{getpass.getuser()}@{node.address}"
    settings = run(["ssh", "-G", node.ssh], seconds=SILENT_SECONDS).stdout.splitlines()
    host = next(line.partition(" ")[2] for line in settings if line.startswith("hostname "))
    return [*command, "-o", f"HostKeyAlias={host}", "-o", f"HostName={node.address}"], node.ssh


def _rsync(
    head: ClusterNode,
    node: ClusterNode,
    shell: Sequence[str],
    way: Sequence[str],
    names: Sequence[str],
    source: str,
    destination: str,
) -> None:
    """Send files from the head to a node. Raises StorageError for a full disk, NetworkError for what can be resumed."""
    if not names:
        return
    argv = ["rsync", "--times", "--copy-links", "--partial", "--protect-args", f"--timeout={SILENT_SECONDS}"]
    argv += [*way, "--files-from=-", f"--rsh={shlex.join(shell)}", source, destination]
    try:
        remote.output(head, argv, seconds=SEND_SECONDS, stdin="\n".join(names) + "\n")
    except ProcessError as error:
        raise sending_error(error, node) from error


def sending_error(error: ProcessError, node: ClusterNode) -> SparkforgeError:
    """Return what rsync's, ssh's or docker's messages mean."""
    last = " ".join(error.why.splitlines()[-3:])
    if re.search(r"No space left on device|Disk quota exceeded", error.why):
        return StorageError(
            f"the disk of {node.name} is full", last, f"free some there, then {AGAIN}", code="storage.full"
        )
    if re.search(r"(?:rsync|docker): (?:command )?not found|No such file or directory: '(?:rsync|docker)'", error.why):
        fix = f"sudo apt install rsync   # on the head and on {node.name}"
        return ProcessError("rsync or docker is missing", last, fix, code="process.failed")
    if re.search(r"Host key verification failed|Permission denied \(", error.why):
        fix = f"ssh-copy-id {node.ssh}   # on the head"
        return NetworkError(f"the head cannot log in on {node.name} at {node.address}", last, fix, code="network.node")
    return NetworkError(f"sending to {node.name} was cut off", last, AGAIN, code="network.node")


def send_image(config: ClusterConfig, *, dry_run: bool = False) -> None:
    """Load the head's image on every other node that has none, or another one, and compare the ids.

    Raises UsageError on the embedded device, InputError if the head has no image, IntegrityError, NetworkError.
    """
    if not config.in_containers:
        raise UsageError("there is no image to send", f"device {config.device} has none", "leave --image out")
    name = f"sparkforge/vllm:{config.stack}"
    wanted = image_id(config.head, name)
    if not wanted:
        raise InputError(f"{config.head.name} has no image {name}", "docker lists none", "./inv build, on the head")
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
            raise sending_error(error, node) from error
        if (loaded := image_id(node, name)) != wanted:
            why = f"{name} is {loaded or 'not there'} after docker load, and {wanted} on {config.head.name}"
            fix = (
                "the same image store in both Docker engines (docker info, Storage Driver), or ./inv image.pull on each"
            )
            raise IntegrityError(f"{node.name} has another image", why, fix, code="integrity.image")


def image_id(node: ClusterNode, name: str) -> str:
    """Return an image's id on a node; empty if it is not there. Raises what `remote.output` raises for no docker."""
    argv = ["docker", "image", "ls", "--no-trunc", "--format", "{{json .ID}}", name]
    lines = remote.output(node, argv, seconds=SILENT_SECONDS).splitlines()
    return str(json.loads(lines[0])) if lines else ""
