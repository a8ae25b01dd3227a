"""The six novels of Jane Austen that the tiny model is trained on, from Debian's r-cran-janeaustenr or a folder.

One chapter is left out, the last of Persuasion: sparkforge/bench/corpus has it, and the accuracy gate scores it.
"""

from __future__ import annotations

import hashlib
import re
import struct
import tempfile
import zlib
from pathlib import Path

from sparkforge.core.errors import InputError, IntegrityError
from sparkforge.core.process import run

PACKAGE = "r-cran-janeaustenr"
DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
# sha256 of each novel as lines joined by newlines; version 1.0.0-1 of the package.
NOVELS = {
    "emma": "dd08b340a56ad4a0a00718d5682528a5a5886ae0aef91c9e0fa528074fa64b75",
    "mansfieldpark": "e0e9ef3863ea77f51f6070062ee0dd50ad9b933223880617629e4e4963ea40ff",
    "northangerabbey": "8618a5acf5be50cc6e9b7680c7469fb6012649ab08c709dfc63c6367989fd31d",
    "persuasion": "726513a6c18bb678427bcbcf7c72d0d20816a67c25b0471b26ddcabf3ebac140",
    "prideprejudice": "2e44edaa4946d64ad541c68e0224f5d672f43bf3ce2a8a0b0637ad5e02fc6eb3",
    "sensesensibility": "0996d90842bbe8093f3b8142c1e77d1b20cff52d1d0615f3ed67733653e74e26",
}
HELD_OUT = ("persuasion", "\nChapter 24\n")  # the novel's text from here on is held out
OVERLAP = 12  # consecutive words that a training text and the held-out text must not share
STRSXP, CHARSXP = 16, 9  # R's serialization: a vector of strings, and one string (R Internals, section 1.8)


def novels(folder: Path | None = None) -> dict[str, str]:
    """Return the novels by name, from NAME.txt files of `folder`, or from the Debian package by `apt-get download`.

    Raises IntegrityError for an unknown text, InputError for a missing text.
    """
    texts = _from_folder(folder) if folder else _from_debian()
    for name, wanted in NOVELS.items():
        digest = hashlib.sha256(texts[name].encode()).hexdigest()
        if digest != wanted:
            raise IntegrityError(
                f"{name} is not the text that the recipe names",
                f"its sha256 is {digest}, not {wanted}",
                f"use {PACKAGE} 1.0.0-1",
                code="integrity.hash",
            )
    return texts


def training_texts(texts: dict[str, str]) -> list[str]:
    """Return each novel without the held-out text, lines joined to paragraphs as in bench/corpus."""
    novel, mark = HELD_OUT
    return [paragraphs(text.partition(mark)[0] if name == novel else text) for name, text in texts.items()]


def paragraphs(text: str) -> str:
    """Join lines to paragraphs, an empty line between two, and runs of white space to one space."""
    joined = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in joined if part) + "\n"


def check_held_out(training: list[str], held_out: str) -> None:
    """Raise InputError if a training text shares OVERLAP words in a row with the held-out text."""
    forbidden = set(_runs(held_out))
    for text in training:
        if shared := next((run for run in _runs(text) if run in forbidden), None):
            raise InputError(
                "the held-out text is in the training texts",
                f"both have: {' '.join(shared)}",
                "leave it out: lab/training/texts.py, HELD_OUT",
                code="input.model",
            )


def _runs(text: str) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[at : at + OVERLAP]) for at in range(len(words) - OVERLAP + 1)]


def _from_folder(folder: Path) -> dict[str, str]:
    try:
        return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in NOVELS}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "cannot read the novels",
            str(error),
            f"give --texts a folder with {', '.join(f'{name}.txt' for name in NOVELS)}",
            code="input.model",
        ) from error


def _from_debian() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as work:
        fix = f"sudo apt-get update, or unpack {PACKAGE} yourself and give --texts FOLDER"
        run(["apt-get", "download", PACKAGE], cwd=Path(work), fix=fix)
        package = next(Path(work).glob("*.deb"))
        run(["dpkg-deb", "-x", package, Path(work) / "root"], fix=fix)
        return dict(zip(NOVELS, unpack((Path(work) / "root" / DATA).read_bytes()), strict=True))


def unpack(data: bytes) -> list[str]:
    """Return the texts of an R lazy-load database of character vectors; each vector's elements are lines."""
    texts = []
    while data:
        # Four bytes, big-endian: the unpacked size. Then a zlib stream.
        reader = zlib.decompressobj()
        texts.append(_lines(reader.decompress(data[4:])))
        data = reader.unused_data
    return texts


def _lines(raw: bytes) -> str:
    """Return the lines of a serialized R character vector (format X, version 3), joined by newlines."""
    encoding = struct.unpack_from(">i", raw, 14)[0]
    at = 18 + encoding
    kind, count = struct.unpack_from(">ii", raw, at)
    at += 8
    lines = []
    for _ in range(count):
        flags, size = struct.unpack_from(">ii", raw, at)
        if kind & 0xFF != STRSXP or flags & 0xFF != CHARSXP:
            raise InputError(
                f"{PACKAGE} holds something else", "no R character vector", "use version 1.0.0-1", code="input.model"
            )
        lines.append(raw[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return "\n".join(lines)
