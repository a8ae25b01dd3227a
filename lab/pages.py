"""python -m lab.pages: check that the pages' links, commands and files exist. `./inv check` runs it.

It prints a line for each problem, and exits with 1 if there are any.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import tasks
from sparkforge.core.paths import ROOT

DOCS, LIBRARY = ROOT / "docs", ROOT / "spark_mxfp4"
FENCE = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:sparkforge|validate|spark_mxfp4|tests|deploy|bench|docs)/[\w./-]+)`")
NAMED_IN_CODE = re.compile(r"(?:spark_mxfp4/)?docs/[\w/.-]+\.md(?:#[\w-]+)?")
SUFFIXES = {".py", ".toml", ".yml", ".jinja", ".sh", ""}  # of files that name pages


def pages() -> dict[Path, str]:
    """Return the text of every page, by its path."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    files = [*DOCS.rglob("*.md"), *top, *(LIBRARY / "docs").glob("*.md"), LIBRARY / "README.md"]
    return {file: file.read_text(encoding="utf-8") for file in sorted(files)}


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return a page's ids: those of `<a id>`, and of headings as in GitHub and MkDocs, with a suffix if repeated."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    ids = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        ids.add(slug if slug not in ids else f"{slug}_1")
    return ids


def broken(page: Path, target: str) -> str:
    """Return why a link of `page` is broken; empty if it is not."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"{target} does not exist"
    for whole in (DOCS, LIBRARY):  # the site, and the library, which may be used without this repository
        if page.is_relative_to(whole) and not file.is_relative_to(whole):
            return f"{target} leaves {whole.name}/"
    return f"{target} has no such heading" if anchor and anchor not in anchors(file) else ""


def links(page: Path, text: str) -> Iterator[str]:
    """Yield the reason for each broken link of a page."""
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        if not target.startswith(("https://", "http://")) and (why := broken(page, target)):
            yield why


def files(page: Path, text: str) -> Iterator[str]:
    """Yield each file of the repository that a page names in backticks and that does not exist."""
    for path in FILE.findall(FENCE.sub("", text)) if page.name != "CHANGELOG.md" else ():
        if not ((LIBRARY if page.is_relative_to(LIBRARY) else ROOT) / path).exists():
            yield f"{path} does not exist"


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each `./inv …` in a shell block, also of several in one line."""
    for language, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language == "sh" else ():
            for part in re.split(r"&&|\|\||;|\s\|\s", re.sub(r"(^|\s)#.*$", "", line)):
                if re.search(r"(^|\s)\./inv(\s|$)", part):
                    yield shlex.split(re.sub(r"[\[\]…]", "", part.split("./inv", 1)[1]))


def unknown(arguments: list[str], commands: Mapping[str, Collection[str]]) -> list[str]:
    """Return the words of a command line that do not exist; `commands` has the options of each command."""
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]  # the rest are another program's arguments
    if not arguments or arguments[0].startswith("-"):
        return sorted(set(arguments) - {"--list", "--help", "--version"})
    name = arguments[0]
    if name not in commands:
        return [name]
    flags = {word.partition("=")[0] for word in arguments[1:] if re.match(r"--?[a-z]", word)}
    options = {re.sub(r"^-(?=[a-z]{2})", "--", word) for word in flags}  # long options take one dash too
    return [option for option in sorted(options - {"--help"}) if option not in commands[name]]


def named_in_code() -> Iterator[str]:
    """Yield each page that code, tables or scripts name and that cannot be found."""
    folders = [ROOT / name for name in ("sparkforge", "validate", "deploy")]
    within = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix in SUFFIXES]
    for file in [*within, *ROOT.glob("*.toml"), *ROOT.glob("*.yml"), *ROOT.glob("Dockerfile*")]:
        for target in NAMED_IN_CODE.findall(file.read_text(encoding="utf-8")):
            if why := broken(ROOT / "code", target):
                yield f"{file.relative_to(ROOT)}: {why}"


def problems(texts: Mapping[Path, str]) -> Iterator[str]:
    """Yield a line for each problem of the pages."""
    contexts = tasks.namespace.to_contexts()
    named = [(name, context.flags) for context in contexts for name in (context.name, *context.aliases) if name]
    commands: dict[str, Collection[str]] = dict(named)
    for page, text in texts.items():
        for why in (*links(page, text), *files(page, text)):
            yield f"{page.relative_to(ROOT)}: {why}"
        for arguments in command_lines(text):
            if wrong := unknown(arguments, commands):
                yield f"{page.relative_to(ROOT)}: ./inv {shlex.join(arguments)}: there is no {', '.join(wrong)}"


def main() -> int:
    """Print the problems and return the exit code."""
    lines = [*problems(pages()), *named_in_code()]
    digest = hashlib.sha256((DOCS / "assets" / "architecture.mmd").read_bytes()).hexdigest()
    if digest not in (DOCS / "assets" / "architecture.svg").read_text(encoding="utf-8"):
        lines.append("docs/assets/architecture.svg is older than its source: run docs/assets/render")
    print(*sorted(set(lines)), sep="\n", end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
