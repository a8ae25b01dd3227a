"""Find the downloads of a CMake project's build, without running CMake.

This module parses only the necessary part of the language: comments, quoted and bracket arguments
(https://cmake.org/cmake/help/latest/manual/cmake-language.7.html), `set`, and the branches of `if`. A download whose
repository or tag cannot be resolved to text is an error; nothing is guessed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core.errors import InputError
from sparkforge.core.files import read_bytes

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
# https://cmake.org/cmake/help/latest/module/ExternalProject.html: every keyword for a download.
REMOTES = ("GIT_REPOSITORY", "GITHUB_REPOSITORY", "URL", "SVN_REPOSITORY", "HG_REPOSITORY", "CVS_REPOSITORY",
           "DOWNLOAD_COMMAND")  # fmt: skip
REVISIONS = ("GIT_TAG", "URL_HASH", "SVN_REVISION", "HG_TAG", "CVS_TAG")
PROGRAMS = {"git", "curl", "wget", "svn", "hg"}
OVERRIDE = re.compile(r"\b[A-Z][A-Z0-9_]*_(?:SRC|SOURCE|ROOT)_DIR(?:_[A-Z0-9]+)?\b")

LARGEST = 4 << 20  # bytes of a CMake file
UNPACK = "unpack the source again: ./inv build --only sources"
MOST_WAYS = 10_000  # combinations of values of one download's variables

Branch = tuple[int, int]  # the number of an `if`, and of one of its branches


@dataclass(frozen=True)
class Declared:
    """A download by the build: its name, address, revision, and the line that declares it."""

    name: str
    repository: str
    tag: str
    file: str
    line: int
    override: str | None  # the variable that names a copy to use instead
    conditions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.tag} from {self.repository} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Command:
    """A command of a CMake file, with the branches of `if` that enclose the command."""

    name: str
    arguments: tuple[str, ...]
    line: int
    path: tuple[Branch, ...] = ()
    conditions: tuple[str, ...] = field(default=(), compare=False)


def declared(tree: Path) -> list[Declared]:
    """Return every download in the CMake files under `tree`, sorted by file and line. Raises InputError (see above)."""
    files = [*tree.rglob("CMakeLists.txt"), *tree.rglob("*.cmake"), *tree.rglob("*.cmake.in")]
    downloads = []
    for file in sorted(files):
        try:
            text = read_bytes(file, largest=LARGEST).decode(errors="replace")
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot read {file.relative_to(tree)}",
                str(error),
                "unpack the source again: ./inv build --only sources",
                code="input.pins",
            ) from error
        downloads += read(text, file.relative_to(tree))
    return downloads


def read(text: str, file: Path) -> list[Declared]:
    """Return every download in one CMake file."""
    downloads: list[Declared] = []
    commands = list(_placed(_commands(text, file)))
    for command in commands:
        if command.name in DOWNLOADS:
            downloads += _content(command, commands, file)
        elif command.name == "file" and command.arguments[:1] in {("DOWNLOAD",), ("download",)}:
            if len(command.arguments) == 1:
                raise _unfollowed(command, file, "no address")
            downloads += _resolved(command, commands, file, remote=command.arguments[1])
        elif command.name in {"execute_process", "add_custom_command", "add_custom_target", "exec_program"}:
            _refuse_program(command, file)
    return downloads


def _content(command: Command, commands: list[Command], file: Path) -> list[Declared]:
    """Return the download of a FetchContent or ExternalProject command; none if it names only a folder."""
    remote = _value(command.arguments, REMOTES)
    if remote is None:
        if command.name == "cpmaddpackage" or (len(command.arguments) > 1 and "SOURCE_DIR" not in command.arguments):
            raise _unfollowed(command, file, " ".join(command.arguments))
        return []  # a folder, or the second half of a declaration
    tag = _value(command.arguments, REVISIONS) or ""
    return _resolved(command, commands, file, name=command.arguments[0], remote=remote, tag=tag)


def _resolved(
    command: Command, commands: list[Command], file: Path, *, name: str = "", remote: str, tag: str = ""
) -> list[Declared]:
    """Resolve the variables in name, address and revision: one result for each path through the branches."""
    texts = (name, remote, tag)
    variables = sorted({match["name"] for text in texts for match in REFERENCE.finditer(text)})
    downloads = set()
    for values in _assignments(variables, command, commands):
        name, remote, tag = (
            REFERENCE.sub(lambda match: values.get(match["name"], match[0]), text)  # noqa: B023 - called at once
            for text in texts
        )
        if not remote or "$" in remote + tag + name or not tag:
            raise _unfollowed(command, file, f"{name} {remote} {tag}".strip())
        override = _override(command)
        downloads.add(Declared(name or remote, remote, tag, str(file), command.line, override, command.conditions))
    return sorted(downloads, key=lambda download: download.tag)


def _unfollowed(command: Command, file: Path, arguments: str) -> InputError:
    return InputError(
        f"{file}:{command.line} downloads something that cannot be followed",
        f"{command.name} {arguments}",
        "read that file and extend lab/upstream/cmake.py",
        code="input.pins",
    )


def _assignments(names: list[str], site: Command, commands: list[Command]) -> list[Mapping[str, str]]:
    """Return each combination of values of `names` at `site`, from `set` commands whose branches are compatible."""
    earlier = [
        command
        for command in commands
        if command.name == "set" and len(command.arguments) > 1 and command.line < site.line
    ]
    choices = [
        [command for command in earlier if command.arguments[0] == name and _together(command.path, site.path)]
        for name in names
    ]
    if math.prod(map(len, choices)) > MOST_WAYS:
        raise InputError(
            f"line {site.line} of a CMake file cannot be followed",
            f"{', '.join(names)} have {math.prod(map(len, choices))} combinations of values",
            "read that file and extend lab/upstream/cmake.py",
            code="input.pins",
        )
    return [
        {command.arguments[0]: command.arguments[1] for command in commands_run}
        for commands_run in itertools.product(*choices)
        if all(_together(a.path, b.path) for a, b in itertools.combinations(commands_run, 2))
    ] or [{}]


def _together(path: tuple[Branch, ...], other: tuple[Branch, ...]) -> bool:
    """Tell whether two paths take the same branch of every `if` that is in both."""
    arms = dict(path)
    return all(arms.get(block, arm) == arm for block, arm in other)


def _override(command: Command) -> str | None:
    """Return the variable that replaces this download if it is set: its name is in a negated condition."""
    refused = [condition for condition in command.conditions if condition.lower().startswith("not ")]
    variables = [name for condition in refused for name in OVERRIDE.findall(condition)]
    return variables[0] if variables else None


def _refuse_program(command: Command, file: Path) -> None:
    if fetching := PROGRAMS & {Path(word).name for word in command.arguments} - {"git"}:
        program = ", ".join(sorted(fetching))
    elif "git" in command.arguments and {"clone", "fetch", "submodule", "pull"} & set(command.arguments):
        program = "git"
    else:
        return
    raise InputError(
        f"{file}:{command.line} runs {program} during the build",
        " ".join(command.arguments),
        "pin its downloads in pins.toml, and extend lab/upstream/cmake.py",
        code="input.pins",
    )


def _value(arguments: tuple[str, ...], keywords: tuple[str, ...]) -> str | None:
    """Return the argument after the first of `keywords`."""
    for keyword, value in itertools.pairwise(arguments):
        if keyword in keywords:
            return value
    return None


def _placed(commands: Iterator[Command]) -> Iterator[Command]:
    """Give each command its branches of `if`, and the conditions that hold there (`not …` for false ones)."""
    arms: list[tuple[Branch, list[str]]] = []
    block = 0
    for command in commands:
        if command.name == "if":
            block += 1
            arms.append(((block, 0), [" ".join(command.arguments)]))
        elif command.name in {"elseif", "else"} and arms:
            (number, arm), conditions = arms[-1]
            earlier = [condition if condition.startswith("not ") else f"not ({condition})" for condition in conditions]
            added = [" ".join(command.arguments)] if command.name == "elseif" else []
            arms[-1] = ((number, arm + 1), [*earlier, *added])
        elif command.name == "endif" and arms:
            arms.pop()
        else:
            conditions = [condition for _, negations in arms for condition in negations]
            yield Command(command.name, command.arguments, command.line, tuple(b for b, _ in arms), tuple(conditions))


def _commands(text: str, file: Path) -> Iterator[Command]:
    """Split a CMake file into its commands. Raises InputError for invalid CMake."""
    name, line, depth, arguments = "", 0, 0, list[str]()
    position, at_line = 0, 1
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise InputError(
                f"{file}:{at_line} cannot be read",
                "its syntax is unknown",
                "extend lab/upstream/cmake.py",
                code="input.pins",
            )
        if match["paren"] == "(":
            depth += 1
            arguments = [] if depth == 1 else arguments
        elif match["paren"] == ")":
            depth -= 1
            if depth < 0:
                raise InputError(
                    f"{file}:{at_line} cannot be read",
                    "a closing parenthesis has no opening one",
                    "unpack it again",
                    code="input.pins",
                )
            if depth == 0:
                yield Command(name.lower(), tuple(arguments), line)
        elif strings := [match[group] for group in ("raw", "quoted", "word") if match[group] is not None]:
            word = strings[0]
            if depth:
                arguments.append(word)
            else:
                name, line = word, at_line
        at_line += text.count("\n", position, match.end())
        position = match.end()
    if depth:
        raise InputError(f"{file}:{line} cannot be read", f"the command {name} does not end", UNPACK, code="input.pins")
