"""Read what a CMake project would download, without running CMake.

Only as much of the language as that takes: comments, quoted and bracket arguments
(https://cmake.org/cmake/help/latest/manual/cmake-language.7.html), `set`, and the branches of `if`. A download whose
repository or tag cannot be followed back to text is an error, never a guess.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.errors import PinError

TOKEN = re.compile(
    r"""(?P<comment>\#\[(?P<hash>=*)\[.*?\](?P=hash)\]|\#[^\n]*)
      | (?P<bracket>\[(?P<equals>=*)\[(?P<raw>.*?)\](?P=equals)\])
      | "(?P<quoted>(?:[^"\\]|\\.)*)"
      | (?P<paren>[()])
      | (?P<space>\s+)
      | (?P<word>(?:[^\s()#"\\]|\\.|"[^"]*")+)""",
    re.VERBOSE | re.DOTALL,
)
REFERENCE = re.compile(r"\$(?P<env>ENV)?\{(?P<name>[A-Za-z0-9_.-]+)\}")
DOWNLOADS = {"fetchcontent_declare", "fetchcontent_populate", "externalproject_add", "cpmaddpackage"}
# https://cmake.org/cmake/help/latest/module/ExternalProject.html: every keyword that names something to bring.
REMOTES = ("GIT_REPOSITORY", "GITHUB_REPOSITORY", "URL", "SVN_REPOSITORY", "HG_REPOSITORY", "CVS_REPOSITORY",
           "DOWNLOAD_COMMAND")  # fmt: skip
REVISIONS = ("GIT_TAG", "URL_HASH", "SVN_REVISION", "HG_TAG", "CVS_TAG")
PROGRAMS = {"git", "curl", "wget", "svn", "hg"}
OVERRIDE = re.compile(r"\b[A-Z][A-Z0-9_]*_(?:SRC|SOURCE|ROOT)_DIR(?:_[A-Z0-9]+)?\b")

Branch = tuple[int, int]  # which `if`, and which of its arms


@dataclass(frozen=True)
class Declared:
    """One thing that a build brings by itself: its name, from where, which revision, and where that is written."""

    name: str
    repository: str
    tag: str
    file: str
    line: int
    override: str | None  # the variable with which a copy is given instead
    conditions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.tag} from {self.repository} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Command:
    """One command of a CMake file, with the arms of `if` that it stands in."""

    name: str
    arguments: tuple[str, ...]
    line: int
    path: tuple[Branch, ...] = ()
    conditions: tuple[str, ...] = field(default=(), compare=False)


def declared(tree: Path) -> list[Declared]:
    """Return every download in the CMake files under `tree`, sorted by file and line. Raises PinError (see above)."""
    files = [*tree.rglob("CMakeLists.txt"), *tree.rglob("*.cmake"), *tree.rglob("*.cmake.in")]
    found = []
    for file in sorted(files):
        found += read(file.read_text(encoding="utf-8", errors="replace"), file.relative_to(tree))
    return found


def read(text: str, file: Path) -> list[Declared]:
    """Return every download in one CMake file."""
    found: list[Declared] = []
    commands = list(_placed(_commands(text, file)))
    for command in commands:
        if command.name in DOWNLOADS:
            found += _content(command, commands, file)
        elif command.name == "file" and command.arguments[:1] in {("DOWNLOAD",), ("download",)}:
            found += _resolved(command, commands, file, ("", command.arguments[1], ""))
        elif command.name in {"execute_process", "add_custom_command", "add_custom_target", "exec_program"}:
            _refuse_program(command, file)
    return found


def _content(command: Command, commands: list[Command], file: Path) -> list[Declared]:
    """Return what a FetchContent or ExternalProject command brings: nothing if it names a folder only."""
    remote = _value(command.arguments, REMOTES)
    if remote is None:
        if command.name == "cpmaddpackage" or (len(command.arguments) > 1 and "SOURCE_DIR" not in command.arguments):
            raise _unfollowed(command, file, " ".join(command.arguments))
        return []  # a folder, or the second half of a declaration
    tag = _value(command.arguments, REVISIONS) or ""
    return _resolved(command, commands, file, (command.arguments[0], remote, tag))


def _resolved(command: Command, commands: list[Command], file: Path, words: tuple[str, str, str]) -> list[Declared]:
    """Follow variables in (name, repository, tag) back to text: one result for each way through the branches."""
    names = sorted({match["name"] for word in words for match in REFERENCE.finditer(word)})
    ways = _assignments(names, command, commands)
    found = []
    for way in ways:
        name, remote, tag = (_replaced(word, way) for word in words)
        if not remote or "$" in remote + tag + name or not tag:
            raise _unfollowed(command, file, f"{name} {remote} {tag}".strip())
        where = (str(file), command.line, _override(command), command.conditions)
        found.append(Declared(name or remote, remote, tag, *where))
    return sorted(set(found), key=lambda one: one.tag)


def _replaced(word: str, values: Mapping[str, str]) -> str:
    return REFERENCE.sub(lambda match: values.get(match["name"], match[0]), word)


def _unfollowed(command: Command, file: Path, words: str) -> PinError:
    return PinError(
        f"{file}:{command.line} brings something that cannot be followed",
        f"{command.name} {words}",
        "read that file and teach forge/cmake.py what it does",
    )


def _assignments(names: list[str], site: Command, commands: list[Command]) -> list[Mapping[str, str]]:
    """Return each combination of values that `names` can have at `site`: `set` commands whose branches go together."""
    before = [one for one in commands if one.name == "set" and len(one.arguments) > 1 and one.line < site.line]
    choices = [[one for one in before if one.arguments[0] == name and _together(one.path, site.path)] for name in names]
    return [
        {one.arguments[0]: one.arguments[1] for one in way}
        for way in itertools.product(*choices)
        if all(_together(a.path, b.path) for a, b in itertools.combinations(way, 2))
    ] or [{}]


def _together(one: tuple[Branch, ...], other: tuple[Branch, ...]) -> bool:
    arms = dict(one)
    return all(arms.get(block, arm) == arm for block, arm in other)


def _override(command: Command) -> str | None:
    """Return the variable whose absence leads to this download, read from the conditions that do not hold here."""
    refused = [condition for condition in command.conditions if condition.lower().startswith("not ")]
    variables = [name for condition in refused for name in OVERRIDE.findall(condition)]
    return variables[0] if variables else None


def _refuse_program(command: Command, file: Path) -> None:
    if fetching := PROGRAMS & {Path(word).name for word in command.arguments} - {"git"}:
        what = ", ".join(sorted(fetching))
    elif "git" in command.arguments and {"clone", "fetch", "submodule", "pull"} & set(command.arguments):
        what = "git"
    else:
        return
    raise PinError(
        f"{file}:{command.line} runs {what} during the build",
        " ".join(command.arguments),
        "see what it brings, pin that in pins.toml, and teach forge/cmake.py about it",
    )


def _value(arguments: tuple[str, ...], keywords: tuple[str, ...]) -> str | None:
    """Return the argument behind the first of `keywords`."""
    for keyword, value in itertools.pairwise(arguments):
        if keyword in keywords:
            return value
    return None


def _placed(commands: Iterator[Command]) -> Iterator[Command]:
    """Give each command the arms of `if` it stands in, and the conditions that hold there (`not …`: that do not)."""
    arms: list[tuple[Branch, list[str]]] = []
    block = 0
    for command in commands:
        if command.name == "if":
            block += 1
            arms.append(((block, 0), [" ".join(command.arguments)]))
        elif command.name in {"elseif", "else"} and arms:
            (number, arm), conditions = arms[-1]
            earlier = [one if one.startswith("not ") else f"not ({one})" for one in conditions]
            own = [" ".join(command.arguments)] if command.name == "elseif" else []
            arms[-1] = ((number, arm + 1), [*earlier, *own])
        elif command.name == "endif" and arms:
            arms.pop()
        else:
            conditions = [one for _, held in arms for one in held]
            yield Command(command.name, command.arguments, command.line, tuple(b for b, _ in arms), tuple(conditions))


def _commands(text: str, file: Path) -> Iterator[Command]:
    """Split a CMake file into its commands. Raises PinError where it is no CMake."""
    name, line, depth, arguments = "", 0, 0, list[str]()
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            at = text.count("\n", 0, position) + 1
            raise PinError(
                f"{file}:{at} cannot be read", "it is no CMake that we know", "teach forge/cmake.py about it"
            )
        position = match.end()
        if match["paren"] == "(":
            depth += 1
            arguments = [] if depth == 1 else arguments
        elif match["paren"] == ")":
            depth -= 1
            if depth == 0:
                yield Command(name.lower(), tuple(arguments), line)
        elif (word := _word(match)) is not None:
            if depth:
                arguments.append(word)
            else:
                name, line = word, text.count("\n", 0, match.start()) + 1


def _word(match: re.Match[str]) -> str | None:
    for group in ("raw", "quoted", "word"):
        if match[group] is not None:
            return match[group]
    return None
