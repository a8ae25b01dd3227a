"""The support archive of `./inv doctor --bundle`: what somebody needs who is to help, without who and where.

The same evidence gives the same bytes: members in order, times and owners zero. Everything in it has gone through
`sparkforge.redact.for_support`; logs are cut to how they began and ended.
"""

from __future__ import annotations

import gzip
import io
import json
import platform
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from serve.evidence import UNIT, Evidence, Log, size
from sparkforge import __version__, paths
from sparkforge.console import say
from sparkforge.errors import CommandError, StorageError
from sparkforge.files import atomic_file
from sparkforge.process import run
from sparkforge.redact import for_support

TOP = "sparkforge-support"
MAX_TOTAL = 16 << 20  # bytes of logs, before compression
UNIT_LOGS = 20  # logs of compilers; a kernel build leaves hundreds
ABOUT = """A support archive of Sparkforge.

doctor.json       what `./inv doctor` found, and what it read
facts.json        versions, the machine, and what was found out for the signatures
reports/          the validator's reports
manifests/        what was built from what, with hashes
logs/             how each log began and how it ended
docker/           the container as `docker inspect` shows it, cut; values of unknown variables left out

Tokens, keys, user and host names, homes, addresses and hardware ids were taken out by rules. Rules miss
things: look through it before you send it.
"""


def write(place: Path, document: Mapping[str, Any], found: Evidence) -> None:
    """Write the archive in one step and say what it holds. Raises StorageError or DiskFullError."""
    files = dict(sorted(members(document, found).items()))
    try:
        with (
            atomic_file(place, mode=0o600) as file,
            gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, data in files.items():
                member = tarfile.TarInfo(f"{TOP}/{name}")
                member.size, member.mode = len(data), 0o644
                archive.addfile(member, io.BytesIO(data))
    except OSError as error:
        raise StorageError(f"cannot write {place}", error.strerror or str(error), f"ls -ld {place.parent}") from error
    say(f"{place} ({size(place.stat().st_size)}) holds:")
    for name, data in files.items():
        say(f"  {name} · {size(len(data))}")
    say(f"tokens, names, homes and addresses were taken out; look before you send it: tar -xOf {place} | less")


def members(document: Mapping[str, Any], found: Evidence) -> dict[str, bytes]:
    """Return the archive's files by name, redacted."""
    found_out = {name: value for name, value in found.facts.items() if name not in found.machine}
    files = {
        "README.txt": ABOUT.encode(),
        "doctor.json": _json(document),
        "facts.json": _json({"versions": _versions(), "machine": found.machine, "found": found_out}),
    }
    for folder, table in (("reports", found.reports), ("manifests", found.documents)):
        for name, value in table.items():
            files[f"{folder}/{_name(name)}"] = _json(value)
    if found.inspected:
        files["docker/inspect.json"] = _json(found.inspected)
    room = MAX_TOTAL
    for log in _worth_keeping(found.logs):
        data = for_support(log.excerpt().decode("utf-8", "replace")).encode()
        if 0 < len(data) <= room:
            room -= len(data)
            files[f"logs/{_name(log.name)}"] = data
    return files


def _worth_keeping(logs: list[Log]) -> Iterator[Log]:
    """Yield servers' and builds' logs, and of the compilers' only the newest."""
    units = [log for log in logs if log.kind == UNIT]
    newest = sorted(units, key=lambda log: log.written, reverse=True)[:UNIT_LOGS]
    yield from (log for log in logs if log.kind != UNIT or log in newest)


def _versions() -> dict[str, str]:
    """Return ours and Python's, and the commit, marked if files differ from it."""
    versions = {"sparkforge": __version__, "python": platform.python_version()}
    with suppress(CommandError):
        told = run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=paths.ROOT)
        versions["commit"] = told.stdout.strip()
    return versions


def _json(value: Any) -> bytes:
    # Through JSON first: tuples become lists, which the redaction walks.
    plain = json.loads(json.dumps(value, default=str))
    return json.dumps(for_support(plain), indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _name(source: str) -> str:
    """Turn a source's name into a file's name that says no more; of CONTAINER:PATH the path's last part."""
    where, colon, path = source.partition(":")
    source = f"{where}_{PurePosixPath(path).name}" if colon else source
    return re.sub(r"[^\w.-]+", "_", for_support(source)).strip("_.") or "unnamed"
