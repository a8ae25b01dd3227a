"""The support archive of `./inv doctor --bundle`: what a helper needs, without names, addresses and secrets.

The same evidence gives the same bytes: members in order, times and owners zero. Everything in it has gone through
`sparkforge.core.redact.for_support`; only the beginning and the end of a long log are kept.
"""

import gzip
import io
import json
import platform
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sparkforge import __version__
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.errors import StorageError, on
from sparkforge.core.files import atomic_file
from sparkforge.core.git import checkout_commit
from sparkforge.core.redact import for_support
from sparkforge.doctor.evidence import UNIT, Evidence, size

TOP = "sparkforge-support"
MAX_TOTAL = 16 << 20  # bytes of logs, before compression
UNIT_LOGS = 20  # the newest logs of compilers; a kernel build leaves hundreds
ABOUT = """A support archive of Sparkforge.

doctor.json       what `./inv doctor` found, and what it read
facts.json        versions, the machine, and the other facts that signatures use
reports/          the validator's reports
manifests/        inputs and outputs of each build stage, with hashes
logs/             the beginning and the end of each log
docker/           the container as `docker inspect` shows it, cut; values of unknown variables left out

Tokens, keys, user and host names, homes, addresses and hardware ids were taken out by rules. Rules miss
things: look through it before you send it.
"""


def write(path: Path, document: Mapping[str, Any], evidence: Evidence) -> None:
    """Write the archive in one step and list its content. Raises StorageError."""
    files = dict(sorted(members(document, evidence).items()))
    try:
        with (
            atomic_file(path, mode=0o600) as file,
            gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, data in files.items():
                member = tarfile.TarInfo(f"{TOP}/{name}")
                member.size, member.mode = len(data), 0o644
                archive.addfile(member, io.BytesIO(data))
    except OSError as error:
        raise StorageError(
            f"cannot write {path}", error.strerror or str(error), on("ls -ld", path.parent), code="storage.access"
        ) from error
    say(f"{path} ({size(path.stat().st_size)}) holds:")
    for name, data in files.items():
        say(f"  {name} · {size(len(data))}")
    say(f"tokens, names, homes and addresses were taken out; look before you send it: tar -xOf {path} | less")


def members(document: Mapping[str, Any], evidence: Evidence) -> dict[str, bytes]:
    """Return the archive's files by name, redacted."""
    commit = checkout_commit(paths.ROOT)
    versions = {
        "sparkforge": __version__,
        "python": platform.python_version(),
        **({"commit": commit} if commit else {}),
    }
    other_facts = {name: value for name, value in evidence.facts.items() if name not in evidence.machine}
    files = {
        "README.txt": ABOUT.encode(),
        "doctor.json": _json(document),
        "facts.json": _json({"versions": versions, "machine": evidence.machine, "found": other_facts}),
    }
    for folder, table in (("reports", evidence.reports), ("manifests", evidence.documents)):
        for name, value in table.items():
            files[f"{folder}/{_name(name)}"] = _json(value)
    if evidence.inspected:
        files["docker/inspect.json"] = _json(evidence.inspected)
    units = sorted((log for log in evidence.logs if log.kind == UNIT), key=lambda log: log.written, reverse=True)
    free = MAX_TOTAL
    for log in evidence.logs:
        if log in units[UNIT_LOGS:]:
            continue
        data = for_support(log.excerpt().decode("utf-8", "replace")).encode()
        if 0 < len(data) <= free:
            free -= len(data)
            files[f"logs/{_name(log.name)}"] = data
    return files


def _json(value: Any) -> bytes:
    # Through JSON first: tuples become lists, which the redaction walks.
    plain = json.loads(json.dumps(value, default=str))
    return json.dumps(for_support(plain), indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _name(source: str) -> str:
    """Return a file's name for a source, redacted; of CONTAINER:PATH only the path's last part."""
    container, colon, path = source.partition(":")
    source = f"{container}_{PurePosixPath(path).name}" if colon else source
    return re.sub(r"[^\w.-]+", "_", for_support(source)).strip("_.") or "unnamed"
