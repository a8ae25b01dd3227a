"""The documentation is consistent: links lead to pages and headings, and every command in a shell block exists."""

import hashlib
import re
import shlex

import pytest

import tasks
from sparkforge.core.paths import ROOT

DOCS, LIBRARY = ROOT / "docs", ROOT / "spark_mxfp4"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
        *(LIBRARY / "docs").glob("*.md"),
        LIBRARY / "README.md",
    ]
)
FENCE = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page):
    """Return a page's ids: of `<a id>`, and of headings as GitHub and MkDocs make them, repetitions with a suffix."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    ids = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        ids.add(slug if slug not in ids else f"{slug}_1")
    return ids


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_internal_links_lead_somewhere(page):
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        for whole in (DOCS, LIBRARY):  # a site, and a project that somebody may cut out
            assert file.is_relative_to(whole) or not page.is_relative_to(whole), f"{target} leaves {whole.name}/"
        if anchor:
            assert anchor in anchors(file), target


def named_in_code():
    """Yield file and page of each `docs/….md` that code, tables or scripts name, with its anchor."""
    suffixes = {".py", ".toml", ".yml", ".jinja", ".sh", ""}
    folders = [ROOT / name for name in ("sparkforge", "validate", "deploy")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes]
    for file in [*files, *ROOT.glob("*.toml"), *ROOT.glob("*.yml"), *ROOT.glob("Dockerfile*")]:
        for target in re.findall(r"(?:spark_mxfp4/)?docs/[\w/.-]+\.md(?:#[\w-]+)?", file.read_text(encoding="utf-8")):
            yield str(file.relative_to(ROOT)), target


@pytest.mark.parametrize(("file", "target"), sorted(set(named_in_code())), ids=str)
def test_page_that_code_names_exists(file, target):
    path, _, anchor = target.partition("#")
    assert (ROOT / path).is_file(), file
    assert not anchor or anchor in anchors(ROOT / path), file


def documented_commands():
    """Yield page and arguments of each `./inv …` in a shell block, also of several in one line."""
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
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


@pytest.mark.parametrize("command", sorted(set(documented_commands())), ids=" ".join)
def test_documented_command_exists(command, commands):
    page, *arguments = command
    arguments = (
        arguments[: arguments.index("--")] if "--" in arguments else arguments
    )  # behind it are another program's
    if not arguments or arguments[0].startswith("-"):
        assert set(arguments) <= {"--list", "--help", "--version"}
        return
    name = arguments[0]
    assert name in commands, f"{page} names ./inv {name}"
    flags = {word.partition("=")[0] for word in arguments[1:] if re.match(r"--?[a-z]", word)}
    options = {re.sub(r"^-(?=[a-z]{2})", "--", word) for word in flags}  # long options take one dash too
    assert [option for option in options - {"--help"} if option not in commands[name].flags] == [], page


def test_every_command_is_documented(commands):
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    headings = {name for line in re.findall(r"^### (.+)$", page, re.MULTILINE) for name in line.split(", ")}
    documented = headings | set(re.findall(r"^\| `([\w.-]+)", page, re.MULTILINE))
    contexts = tasks.namespace.to_contexts()
    assert [context.name for context in contexts if not documented & {context.name, *context.aliases}] == []


def test_the_page_has_every_commands_example(commands):
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    lines = {line.strip() for _, block in FENCE.findall(page) for line in block.splitlines()}
    assert [example for name in commands if (example := tasks.namespace[name].example) not in lines] == []


def files_of_the_repository():
    """Yield page and file of each path in backticks that begins with a folder of the repository."""
    for page in set(PAGES) - {ROOT / "CHANGELOG.md"}:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for path in re.findall(r"`((?:sparkforge|validate|spark_mxfp4|tests|deploy|bench|docs)/[\w./-]+)`", text):
            folder = LIBRARY if page.is_relative_to(LIBRARY) else ROOT
            yield str(page.relative_to(ROOT)), str((folder / path).relative_to(ROOT))


@pytest.mark.parametrize(("page", "path"), sorted(set(files_of_the_repository())), ids=str)
def test_file_that_a_page_names_exists(page, path):
    assert (ROOT / path).exists(), page


def test_diagram_is_rendered_from_its_source():
    digest = hashlib.sha256((DOCS / "assets" / "architecture.mmd").read_bytes()).hexdigest()
    assert digest in (DOCS / "assets" / "architecture.svg").read_text(encoding="utf-8"), "run docs/assets/render"
