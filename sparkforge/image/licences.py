"""Licence texts for the images: wheels without a text get upstream's, from the table deploy/licences.toml.

The report in an image has each text once: those in dist-info folders and Debian's copyright files.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import read_toml, sha256_file, write_atomic
from sparkforge.core.paths import ROOT

TABLE = ROOT / "deploy/licences.toml"
COMMON = re.compile(r"/usr/share/common-licenses/([\w.+-]*\w)")
REPORT = "licences.txt"  # in the tree
TEXT = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)


def add(packages: Path, table: Path | None = None) -> list[str]:
    """Add the table's texts to each distribution without a licence text; return the names of these distributions.

    The texts go to dist-info/licenses (PEP 639). Raises IntegrityError if one does not have its pinned hash.
    """
    table = table or TABLE
    document: dict[str, Any] = read_toml(table)
    added = []
    for name, info in without(packages).items():
        if name not in document["distributions"]:
            continue
        for file, text in document["distributions"][name]["files"].items():
            source = table.with_suffix("") / text
            if not source.is_file() or sha256_file(source) != document["texts"][text]:
                failure, why = f"{source} is not the text in {table.name}", "it is missing, or its sha256 differs"
                raise IntegrityError(failure, why, f"git checkout {table.parent.name}", code="integrity.hash")
            write_atomic(info / "licenses" / file, source.read_bytes())
        added.append(name)
    return added


def without(packages: Path) -> dict[str, Path]:
    """Return the distributions that have no licence text in their dist-info, by name."""
    return {
        canonicalize_name(info.name.partition("-")[0]): info
        for info in sorted(packages.glob("*.dist-info"))
        if not any(path.is_file() and TEXT.search(path.name) for path in info.rglob("*"))
    }


def report(bill: Mapping[str, Any], packages: Path, debian: Path) -> str:
    """Return the licences of a bill's components with a purl, as text: a line for each component, then the texts.

    `packages` is the image's site-packages, `debian` the root of a file system with its Debian packages.
    """
    numbers, users, lines = dict[str, int](), defaultdict[int, list[str]](list), list[str]()
    for component in (entry for entry in bill["components"] if "purl" in entry):
        name, info = component["name"], Path()
        if component["purl"].startswith("pkg:deb/"):
            files = [debian / "usr/share/doc" / name / "copyright"]
        else:  # a distribution, which has its RECORD as a child
            info = packages / next((Path(file["name"]).parent for file in component.get("components", [])), "none")
            files = sorted(path for path in info.rglob("*") if TEXT.search(str(path.relative_to(info))))
        texts = list[int]()
        for text in (path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()):
            texts.append(numbers.setdefault(text, len(numbers) + 1))
            users[texts[-1]].append(name)
        licence = " and ".join(
            entry.get("expression") or entry["license"].get("id") or entry["license"]["name"]
            for entry in component.get("licenses", [])
        )
        where = f"text {', '.join(map(str, texts))}" if texts else "no text"
        lines.append(f"{name} {component.get('version', '')}: {licence or 'not named'}; {where}")
    for name in sorted({name for text in numbers for name in COMMON.findall(text)}):  # Debian's files refer to these
        if (path := debian / "usr/share/common-licenses" / name).is_file():
            number = numbers.setdefault(path.read_text(encoding="utf-8", errors="replace"), len(numbers) + 1)
            users[number].append(f"Debian's {name}")
    parts = [f"{'=' * 80}\ntext {number}: {', '.join(users[number])}\n\n{text}" for text, number in numbers.items()]
    return "\n".join([*lines, "", *parts]) + "\n"
