"""The accuracy gate's text that is not in this repository; pins.toml has its source.

The text's file in the state folder equals the file in the archive, and is checked against its pin at every read.
"""

import hashlib
import io
import os
import zipfile
from pathlib import Path

import httpx

from sparkforge import pins
from sparkforge.bench.options import HUB
from sparkforge.core import http, paths
from sparkforge.core.console import say, without_passwords
from sparkforge.core.errors import InputError, IntegrityError, NetworkError
from sparkforge.core.files import DocumentError, read_bytes, write_atomic
from sparkforge.pins import TextPin

ENDPOINT = "https://huggingface.co"  # unless HF_ENDPOINT names another
FETCH = "./inv bench.acc --fetch-text"
SECONDS = 600.0  # time limit of the download of 4.7 MB
TIMEOUT = httpx.Timeout(30.0)


def path(name: str) -> Path:
    """Return the path of a text. The file exists only after `fetch`."""
    return paths.state() / "texts" / f"{name}.txt"


def read(name: str, pin: TextPin) -> str:
    """Return a text as the competition's script reads it. Raises InputError if it is missing or not the pinned one."""
    if not path(name).exists():
        why = f"the gate's limits belong to this text; it is not in this repository ({pin.licence})"
        size, file = int(pin.pinned_files[pin.archive].size) / 1e6, Path(pin.member).name
        fix = f"{FETCH} {HUB}   # {size:.1f} MB; without a network: {FETCH} {file}"
        raise InputError(f"the text {name} is not here", why, fix, code="input.text")
    data = _read(path(name), int(pin.pinned_files[pin.member].size), f"{FETCH} {HUB}")
    if (sha256 := hashlib.sha256(data).hexdigest()) != pin.pinned_files[pin.member].sha256:
        why = f"its sha256 is {sha256}, so the limits do not apply"
        raise InputError(f"{path(name)} is not {name}", why, f"{FETCH} {HUB}", code="input.text")
    return join_rows(data.decode())


def join_rows(text: str) -> str:
    """Return the non-blank lines, each with its newline, joined by newlines.

    The competition's script does the same (accuracy_test_alternative.py, 2026-01-20): a row of its data set is a line
    with its newline, or empty for a blank line.
    """
    return "\n".join(f"{line}\n" for line in text.split("\n") if line.strip())


def fetch(source: str) -> Path:
    """Fetch the text of pins.toml into the state folder, check it, and return its path.

    `source` is HUB or a file: the archive or its member. Raises InputError, IntegrityError, NetworkError.
    """
    name, pin = next(iter(pins.load().texts.items()))
    archive, member = pin.pinned_files[pin.archive], pin.pinned_files[pin.member]
    fix = f"{FETCH} {HUB}   # or a file: {pin.archive} or {Path(pin.member).name}"
    data = _download(pin) if source == HUB else _read(Path(source), max(int(archive.size), int(member.size)), fix)
    sha256, text = hashlib.sha256(data).hexdigest(), data
    if sha256 == archive.sha256:
        with zipfile.ZipFile(io.BytesIO(data)).open(pin.member) as file:
            text = file.read()
    if hashlib.sha256(text).hexdigest() != member.sha256:
        wanted = f"wanted {member.sha256} ({pin.member}) or {archive.sha256}"
        why = f"it has {len(data)} bytes with sha256 {sha256}; {wanted}; nothing was kept"
        raise IntegrityError(f"{source} is not the pinned text", why, fix, code="integrity.hash")
    write_atomic(path(name), text)
    say(f"{path(name)}: sha256 {member.sha256}, from {source}")
    return path(name)


def _read(file: Path, largest: int, fix: str) -> bytes:
    try:
        return read_bytes(file, largest=largest)
    except (OSError, DocumentError) as error:
        why = error.why if isinstance(error, DocumentError) else error.strerror or str(error)
        raise InputError(f"cannot read {file}", why, fix, code="input.text") from error


def _download(pin: TextPin) -> bytes:
    endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    url = f"{endpoint}/datasets/{pin.dataset}/resolve/{pin.revision}/{pin.archive}"
    try:
        with httpx.Client(timeout=TIMEOUT, follow_redirects=True) as client:
            size = int(pin.pinned_files[pin.archive].size)
            response = http.request(client, "GET", url, seconds=SECONDS, limit=size)
        why = "" if response.is_success else f"HTTP {response.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        why = f"{type(error).__name__}: {error}"[:300]
    if why:
        copy = f"copy {Path(pin.member).name} here, and name it with --fetch-text"
        fix = f"again   # check the network and HF_ENDPOINT; or {copy}"
        raise NetworkError(f"cannot fetch {pin.archive}", without_passwords(why), fix, code="network.fetch")
    return response.content
