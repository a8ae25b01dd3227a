"""The documentation is consistent: links lead to pages and headings, and every command in a shell block exists."""

import functools
import hashlib
import re
import shlex

import pytest

import tasks
from sparkforge.core.paths import ROOT

DOCS, LIBRARY = ROOT / "docs", ROOT / "spark_mxfp4"
FENCE = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def pages():
    """Return the text of every page, by its path."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    files = [*DOCS.rglob("*.md"), *top, *(LIBRARY / "docs").glob("*.md"), LIBRARY / "README.md"]
    return {file: file.read_text(encoding="utf-8") for file in sorted(files)}


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


@functools.cache
def anchors(page):
    """Return a page's ids: of `<a id>`, and of headings as GitHub and MkDocs make them, repetitions with a suffix."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    ids = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        ids.add(slug if slug not in ids else f"{slug}_1")
    return ids


def broken(page, target):
    """Return why a link of `page` leads nowhere; empty if it leads somewhere."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"{page}: {target} does not exist"
    for whole in (DOCS, LIBRARY):  # a site, and a project that somebody may cut out
        if page.is_relative_to(whole) and not file.is_relative_to(whole):
            return f"{page}: {target} leaves {whole.name}/"
    return f"{page}: {target} has no such heading" if anchor and anchor not in anchors(file) else ""


def test_internal_links_lead_somewhere(pages):
    links = [(page, target) for page, text in pages.items() for target in LINK.findall(without_code(text))]
    internal = [(page, target) for page, target in links if not target.startswith(("https://", "http://"))]
    assert len(internal) > 100
    assert list(filter(None, (broken(page, target) for page, target in internal))) == []


def named_in_code():
    """Yield file and page of each `docs/….md` that code, tables or scripts name, with its anchor."""
    suffixes = {".py", ".toml", ".yml", ".jinja", ".sh", ""}
    folders = [ROOT / name for name in ("sparkforge", "validate", "deploy")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes]
    for file in [*files, *ROOT.glob("*.toml"), *ROOT.glob("*.yml"), *ROOT.glob("Dockerfile*")]:
        for target in re.findall(r"(?:spark_mxfp4/)?docs/[\w/.-]+\.md(?:#[\w-]+)?", file.read_text(encoding="utf-8")):
            yield str(file.relative_to(ROOT)), target


def test_pages_that_code_names_exist():
    targets = sorted(set(named_in_code()))
    assert len(targets) > 20
    assert [f"{file}: {why}" for file, target in targets if (why := broken(ROOT / "code", target))] == []


def documented_commands(pages):
    """Yield page and arguments of each `./inv …` in a shell block, also of several in one line."""
    for page, text in pages.items():
        for language, block in FENCE.findall(text):
            if language != "sh":
                continue
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"&&|\|\||;|\s\|\s", re.sub(r"(^|\s)#.*$", "", line)):
                    if re.search(r"(^|\s)\./inv(\s|$)", part):
                        arguments = shlex.split(re.sub(r"[\[\]…]", "", part.split("./inv", 1)[1]))
                        yield str(page.relative_to(ROOT)), *arguments


@pytest.fixture(scope="module")
def commands():
    """Return Invoke's parser context of every command, by name and by alias."""
    return {name: context for context in tasks.namespace.to_contexts() for name in (context.name, *context.aliases)}


def unknown(arguments, commands):
    """Return what of a command line does not exist."""
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]  # behind it are another program's
    if not arguments or arguments[0].startswith("-"):
        return sorted(set(arguments) - {"--list", "--help", "--version"})
    name = arguments[0]
    if name not in commands:
        return [name]
    flags = {word.partition("=")[0] for word in arguments[1:] if re.match(r"--?[a-z]", word)}
    options = {re.sub(r"^-(?=[a-z]{2})", "--", word) for word in flags}  # long options take one dash too
    return [option for option in sorted(options - {"--help"}) if option not in commands[name].flags]


def test_documented_commands_exist(pages, commands):
    lines = sorted(set(documented_commands(pages)))
    assert len(lines) > 100
    assert [(page, wrong) for page, *arguments in lines if (wrong := unknown(arguments, commands))] == []


def files_of_the_repository(pages):
    """Yield page and file of each path in backticks that begins with a folder of the repository."""
    names = re.compile(r"`((?:sparkforge|validate|spark_mxfp4|tests|deploy|bench|docs)/[\w./-]+)`")
    for page, text in pages.items():
        for path in names.findall(FENCE.sub("", text)) if page.name != "CHANGELOG.md" else ():
            yield page, (LIBRARY if page.is_relative_to(LIBRARY) else ROOT) / path


def test_files_that_pages_name_exist(pages):
    files = list(files_of_the_repository(pages))
    assert len(files) > 50
    assert [f"{page}: {path}" for page, path in files if not path.exists()] == []


def test_diagram_is_rendered_from_its_source():
    digest = hashlib.sha256((DOCS / "assets" / "architecture.mmd").read_bytes()).hexdigest()
    assert digest in (DOCS / "assets" / "architecture.svg").read_text(encoding="utf-8"), "run docs/assets/render"
