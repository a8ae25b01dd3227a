"""The texts that the accuracy gate scores and that are not in this repository: pins.toml says where they are from.

A text lies in the state folder as its archive has it, and is checked against its pin whenever it is read.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from sparkforge import pins
from sparkforge.core import http, paths
from sparkforge.core.console import echo, say
from sparkforge.core.documents import DocumentError, read_bytes
from sparkforge.core.errors import InputError, IntegrityError, NetworkError
from sparkforge.core.files import write_atomic
from sparkforge.core.urls import without_passwords
from sparkforge.pins import PinnedFile, TextPin

HUB = "https://huggingface.co"  # unless HF_ENDPOINT names another
FETCH = "./inv bench.text"
SECONDS = 600.0  # for the whole download of 4.7 MB
TIMEOUT = httpx.Timeout(30.0)


def path(name: str) -> Path:
    """Return where a text lies, or will lie once it is fetched."""
    return paths.state() / "texts" / f"{name}.txt"


def read(name: str, pin: TextPin) -> str:
    """Return a text as the competition's script makes it. Raises InputError if it is not here, or is another one."""
    file = path(name)
    try:
        data = read_bytes(file, largest=_size(pin.pinned_files[pin.member]))
    except FileNotFoundError:
        raise InputError(
            f"the text {name} is not here",
            f"the gate's limits belong to this text; it is not in this repository ({pin.licence})",
            f"{FETCH}   # fetches {_size(pin.pinned_files[pin.archive]) / 1e6:.1f} MB; without a network: "
            f"{FETCH} --from {Path(pin.member).name}",
            code="input.text",
        ) from None
    except (OSError, DocumentError) as error:
        why = error.why if isinstance(error, DocumentError) else error.strerror or str(error)
        raise InputError(f"cannot read {file}", why, FETCH, code="input.text") from error
    if (sha256 := hashlib.sha256(data).hexdigest()) != pin.pinned_files[pin.member].sha256:
        why = f"its sha256 is {sha256}, so limits mean nothing on it"
        raise InputError(f"{file} is not {name}", why, FETCH, code="input.text")
    return join_rows(data.decode())


def join_rows(text: str) -> str:
    """Return the lines that are not blank, each with its newline, joined by newlines.

    So does the competition's script (accuracy_test_alternative.py, 2026-01-20): a row of its data set is a line with
    its newline, or empty for a blank line.
    """
    return "\n".join(f"{line}\n" for line in text.split("\n") if line.strip())


def fetch(source: str, name: str = "") -> Path:
    """Fetch a text into the state folder, check it, and print its path.

    `source` is a file (the archive or its member), a folder that holds one, a URL of one, or empty for the hub; `name`
    is one of pins.toml, by default the first. Raises InputError, IntegrityError, NetworkError.
    """
    texts = pins.load().texts
    name = name or next(iter(texts), "")
    if name not in texts:
        known = ", ".join(texts) or "none"
        raise InputError(f"there is no text {name!r}", f"pins.toml has {known}", FETCH, code="input.text")
    pin = texts[name]
    if not source and _is_whole(name, pin):
        say(f"{name} is here, with the sha256 of its pin")
    else:
        data, origin = _get(source, pin)
        write_atomic(path(name), _member(data, origin, pin))
        say(f"{name}: sha256 {pin.pinned_files[pin.member].sha256}, from {origin}")
    echo(str(path(name)))
    return path(name)


def _is_whole(name: str, pin: TextPin) -> bool:
    try:
        read(name, pin)
    except InputError:
        return False
    return True


def _get(source: str, pin: TextPin) -> tuple[bytes, str]:
    """Return the bytes of the archive or of its member, and their origin for messages."""
    if "://" in source:
        return _download(source, pin), without_passwords(source)
    if source:
        file = _find(Path(source), pin)
        try:
            return read_bytes(file), str(file)
        except (OSError, DocumentError) as error:
            why = error.why if isinstance(error, DocumentError) else error.strerror or str(error)
            raise InputError(f"cannot read {file}", why, f"{FETCH} --from FILE", code="input.text") from error
    endpoint = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    url = f"{endpoint}/datasets/{pin.dataset}/resolve/{pin.revision}/{pin.archive}"
    return _download(url, pin), without_passwords(url)


def _find(source: Path, pin: TextPin) -> Path:
    """Return the file itself, or the first of a folder that has the name of the member or of the archive."""
    if not source.is_dir():
        return source
    names = [pin.member, Path(pin.member).name, pin.archive]
    for name in names:
        if (source / name).is_file():
            return source / name
    raise InputError(
        f"{source} holds no such text", f"it has none of {', '.join(names)}", f"{FETCH} --from FILE", code="input.text"
    )


def _download(url: str, pin: TextPin) -> bytes:
    """Return what a URL answers, at most the larger pin's size. Raises NetworkError."""
    limit = max(_size(file) for file in pin.pinned_files.values())
    try:
        with httpx.Client(timeout=TIMEOUT, follow_redirects=True) as client:
            response = http.request(client, "GET", url, seconds=SECONDS, limit=limit)
        why = "" if response.is_success else f"HTTP {response.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        why = f"{type(error).__name__}: {error}"[:300]
    if why:
        name = Path(urlsplit(url).path).name or pin.archive
        fix = f"check the network and HF_ENDPOINT; or copy {Path(pin.member).name} here: {FETCH} --from FILE"
        raise NetworkError(f"cannot fetch {name}", without_passwords(why), fix, code="network.fetch")
    return response.content


def _member(data: bytes, origin: str, pin: TextPin) -> bytes:
    """Return the member's bytes from those of the archive, or of itself. Raises IntegrityError for any others."""
    archive, member = pin.pinned_files[pin.archive], pin.pinned_files[pin.member]
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 == member.sha256:
        return data
    why = f"it has {len(data)} bytes with sha256 {sha256}; wanted {member.sha256} ({pin.member}) or {archive.sha256}"
    if sha256 == archive.sha256:
        try:
            with zipfile.ZipFile(io.BytesIO(data)).open(pin.member) as file:
                unpacked = file.read(_size(member) + 1)
        except (KeyError, zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError) as error:
            why = f"{pin.member} cannot be unpacked from it: {error}"
        else:
            if hashlib.sha256(unpacked).hexdigest() == member.sha256:
                return unpacked
            why = f"its {pin.member} has another sha256 than the pin, {member.sha256}"
    raise IntegrityError(
        f"{origin} is not the pinned text",
        f"{why}; nothing was kept",
        f"{FETCH}, or {FETCH} --from FILE with {pin.archive} or {Path(pin.member).name}",
        code="integrity.hash",
    )


def _size(file: PinnedFile) -> int:
    """Return a pin's size in bytes; a text's is never unknown (sparkforge/pins/table.py)."""
    return int(file.size)
