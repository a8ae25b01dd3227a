"""Writes the generated pages of docs/reference: `python -m lab.reference_pages`; `--check` compares them instead.

Each page is generated from the code or the table that it describes, and so are the JSON schemas of results, plans and
the status. `./inv check` runs `--check`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from invoke.parser.argument import Argument

from lab.ledger import render
from sparkforge import pins
from sparkforge.bench.schema import Result
from sparkforge.cli import namespace, program
from sparkforge.cli.command import DEFAULT_STACK, CommandTask
from sparkforge.core import tables
from sparkforge.core.errors import ProcessError, SparkforgeError
from sparkforge.core.files import read_toml, write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.core.program import exit_code
from sparkforge.core.tables import Record
from sparkforge.doctor import signatures
from sparkforge.doctor.signatures import Kind, Seen, Severity
from sparkforge.plan.document import Plan
from sparkforge.qualify import ledger
from sparkforge.serve import limits, profiles
from sparkforge.serve.status import StatusReport
from validate.checks import CHECKS, arguments, software
from validate.profiles import PROFILES, Profile

FOLDER = ROOT / "docs" / "reference"
CODES = ROOT / "lab" / "errors.toml"
COMMANDS = """# Commands

Run every command as `./inv COMMAND` from the checkout. The first run makes `.venv` from `locks/tools.txt`.

- `./inv` shows the daily commands, `./inv --list` all of them, `./inv --list bench` one group. `./inv COMMAND --help`
  shows the options and an example. `./inv --version` prints the version.
- Relative paths and `~` start in the folder that you run the command in. Several values are separated by commas.
- [Errors](errors.md) lists the exit codes. `./inv` ends with 3 if it finds no Python 3.11, 3.12 or 3.13.
- Ctrl-C, SIGTERM and SIGHUP end a command and the programs that it started, with exit code 130, 143 or 129. Run the
  same command again to continue.
- `--stack NAME` selects a [stack](../concepts/stacks.md) of `pins.toml`.

`python -m lab.reference_pages` makes this page from the help texts.

{commands}

## Shared options

Several commands have these options. If a command describes an option itself, that description applies.

{shared}

"""
CHECKS_PAGE = """# Startup checks

The [validator](../concepts/validation.md) runs these checks before a server starts. If a *required* check fails,
the server does not start; an *advised* check can only warn. A fact that cannot be determined counts as failed. *Deep*
checks query torch and vLLM in a child process.

The profile `gpu`, for other NVIDIA GPUs, has [gpu-supported](#gpu-supported), [gpu-memory](#gpu-memory) and the checks
in `validate/profiles.toml`. The profile `spark` has not run on a DGX Spark ([Hardware ledger](../hardware.md)).
`python -m lab.reference_pages` makes this page from `validate/checks`.

| Check | spark | embedded | What must be true |
| --- | --- | --- | --- |
{table}

{sections}
"""

SETTINGS = """# Settings

Sparkforge reads command-line options and environment variables. Options override variables. Invalid values, and secrets
that cannot be read, are refused.

`python -m lab.reference_pages` makes this page from `lab/variables.toml`, `docker-compose.yml` and
`sparkforge/serve/limits.toml`.

## On the host

For `./inv` commands.

{host}

## The server

Set these in the environment of `./inv up`, in `.env` for Compose, or with `-e` for `docker run`. Variables for vLLM
itself go into `vllm.env` beside `docker-compose.yml`.

{server}

## For Compose

Write these into `.env` beside `docker-compose.yml`.

{compose}

## In the container

Compose sets these. Set them yourself with `docker run -e`.

{container}

## Bounds of a request

`SPARKFORGE_LIMITS="sequences=128, body-seconds=120"` changes bounds; 0 removes one. They apply on every device, after
the check of the API key; a cluster has the defaults. A request above a bound gets an error that names the bound, in the
format of OpenAI, or of Anthropic on `/v1/messages`; 429 has `Retry-After`. A client is one address, so all clients
behind a proxy count as one. One client's answers take at most eight ninths of `--max-num-seqs`; its other requests
wait.

{bounds}

## For the experts

{experts}

## For kernels and compilers

{compilers}
"""
PROFILES_PAGE = """# Profiles

A *serve profile* is a set of vLLM's flags and variables. Select one with `./inv up --profile NAME` or
`SPARKFORGE_SERVE_PROFILE`. **Not verified**: no profile was run on a Spark. vLLM's own parsers accept every flag.

A *validator profile* is a set of [startup checks](checks.md): `spark` for a DGX Spark, `gpu` for other NVIDIA GPUs,
`embedded` for CPUs. In a container `SPARKFORGE_PROFILE` selects `spark` or `embedded`. With `embedded`, a serve profile
for GPUs is refused (exit code 2).

`python -m lab.reference_pages` makes this page from `sparkforge/serve/profiles.toml`, which explains its format. [Tune
a server](../guide/tune.md) compares profiles.

| Profile | For |
| --- | --- |
{table}

{sections}

## Stacks

{stacks}
"""
ERRORS = """# Errors

Every error has three parts: what failed, why, and the next command to run. The first part ends with the
error's code in brackets:

```text
✗ vLLM's wheel is not the file that was pinned [integrity.hash]
  why:  sha256 is 0f3a…, wanted 9c41…
  next: ./inv build --only sources
```

The code begins with its family, which has one exit code. Codes do not change between releases. Each has an anchor on
this page, such as [`errors.html#integrity.hash`](#integrity.hash).

## Families

| exit code | family | meaning |
| ---: | --- | --- |
{families}

## Codes

| code | meaning |
| --- | --- |
{codes}
"""
ERROR_ROW = '| <a id="{code}"></a>`{code}` | {text} |'
VARIABLES = Path(__file__).with_name("variables.toml")
LONG = 9  # a command with all options of another command that has more than this many refers to that command
DEFAULT = re.compile(r"\$\{(\w+):-([^}$]+)\}")


class Variable(Record):
    """An environment variable's row; an empty default is that of docker-compose.yml, or none."""

    default: str = ""
    meaning: str


class Variables(Record):
    """Environment variables by section of the settings page; a key has one or several names, separated by spaces."""

    host: Mapping[str, Variable]
    server: Mapping[str, Variable]
    compose: Mapping[str, Variable]
    container: Mapping[str, Variable]
    experts: Mapping[str, Variable]
    compilers: Mapping[str, Variable]


def commands() -> str:
    """Return the page of every command: description, example and options, by the groups of `./inv --list`.

    The most common text of an option is in a separate list; other texts are at their commands.
    """
    contexts = {str(name): context for context in namespace.to_contexts() for name in (context.name, *context.aliases)}
    names = [name for group in program.GROUPS.values() for name in program.expanded(group)]
    options = {name: [_option(argument) for argument in dict.fromkeys(contexts[name].args.values())] for name in names}
    uses = Counter(option for name in names for option in options[name])
    shared = set(dict(option for option, count in reversed(uses.most_common()) if count > 1).items())
    parts = []
    long_lists: dict[str, list[str]] = {}  # of commands with many options, all of them shared
    for group, members in program.GROUPS.items():
        parts.append(f"## {group.capitalize()}")
        for name in program.expanded(members):
            command = namespace[name]
            parts += [f"### {name}", inspect.cleandoc(command.__doc__ or "")]
            own = [f"- `{flag}`: {text}" for flag, text in options[name] if (flag, text) not in shared]
            common = [f"[`{flag}`](#shared-options)" for flag, text in options[name] if (flag, text) in shared]
            if isinstance(command, CommandTask):
                parts += [f"```sh\n{command.example}\n```"] if command.example else []
                own += [f"- `-- WORDS`: {_words(command.rest_text)}"] if command.rest else []
            if same := next((other for other, links in long_lists.items() if set(links) <= set(common)), ""):
                rest = [link for link in common if link not in long_lists[same]]
                common = [f"every option of [{same}](#{same.replace('.', '')})", *rest]
            elif not own and len(common) > LONG:
                long_lists[name] = common
            own += [f"- {', '.join(common)}"] if common else []
            parts += ["\n".join(own)] if own else []
    explained = "\n".join(f"- `{flag}`: {text}" for flag, text in sorted(shared))
    return COMMANDS.format(commands="\n\n".join(parts), shared=explained)


def _option(argument: Argument) -> tuple[str, str]:
    """Return an option's spelling and its help text."""
    name = str(argument.names[0])
    flag = name.upper() if argument.positional else ", ".join([f"--{name}", *(f"-{n}" for n in argument.nicknames)])
    default = f" (default: {argument.default})" if argument.takes_value and argument.default else ""
    return flag, _words((argument.help or "") + default)


def _words(text: str) -> str:
    return " ".join(text.split()).replace(DEFAULT_STACK, pins.load().default)


def checks() -> str:
    """Return the page of the validator's checks, with the texts of the table."""
    spark, embedded = PROFILES["spark"], PROFILES["embedded"]
    table = [
        f"| [{name}](#{name}) | {_severity(spark, name)} | {_severity(embedded, name)} | {check.meaning} |"
        for name, check in CHECKS.items()
    ]
    sections, texts = list[str](), read_toml(ROOT / "lab" / "checks.toml")
    if texts.keys() != CHECKS.keys():
        why = ", ".join(sorted(texts.keys() ^ CHECKS.keys()))
        raise ProcessError("lab/checks.toml is not up to date", why, "add or remove these rows", code="process.checks")
    for name, check in CHECKS.items():
        deep = "*Deep.* " if check.deep else ""
        sections += [f"## {name}", f"{deep}{texts[name]}"]
        if name == "serve-arguments":
            sections.append(_rows("| Argument | Result | Why |\n| --- | --- | --- |", _argument_rows()))
        if name == "unknown-environment":
            sections.append(_rows("| Variable | Now |\n| --- | --- |", _replacement_rows()))
        sections.append(f"Fix: `{check.fix}`")
    return CHECKS_PAGE.format(table="\n".join(table), sections="\n\n".join(sections))


def _severity(profile: Profile, name: str) -> str:
    return {True: "required", False: "advised", None: "-"}[profile.severities.get(name)]


def _argument_rows() -> Iterable[str]:
    for rule in arguments.RULES:
        yield f"| {', '.join(f'`{flag}`' for flag in rule.flags)} | {rule.status.value} | {rule.why} |"


def _replacement_rows() -> Iterable[str]:
    for flags in dict.fromkeys(software.REPLACEMENTS.values()):
        variables = [f"`{variable}`" for variable, now in software.REPLACEMENTS.items() if now == flags]
        yield f"| {', '.join(variables)} | `{flags}` |"


def _rows(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, *rows])


def problems() -> str:
    """Return the page of known problems: its introduction unchanged, and the tables of the signatures."""
    above_tables = (FOLDER / "problems.md").read_text(encoding="utf-8").partition("\n## ")[0].rstrip()
    known, parts = signatures.load(), [above_tables]
    for kind in Kind:
        rows = [f"## {kind[0].upper()}{kind[1:]}", "", "| id | what it says | read on |", "| --- | --- | --- |"]
        for signature in (signature for signature in known if signature.kind is kind):
            mark = "" if signature.severity is Severity.FATAL else f" *({signature.severity})*"
            headline = re.sub(r"\{\w+\}(?:\{\w+\})*", "…", signature.what)
            rows.append(f"| `{signature.id}`{mark} | {headline} | {_link(signature.seen[0])} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _link(seen: Seen) -> str:
    if thread := re.fullmatch(r"https://github\.com/[\w.-]+/([\w.-]+)/\w+/(\d+)", seen.where):
        return f"[{thread[1]}#{thread[2]}]({seen.where})"
    if page := re.match(r"https://([\w.-]+)/", seen.where):
        return f"[{page[1]}]({seen.where})"
    return f"[{seen.where.rpartition('/')[2]}]({os.path.relpath(seen.where, 'docs/reference')})"


def errors() -> str:
    """Return the page of exit codes and error codes."""
    families = sorted(SparkforgeError.__subclasses__(), key=lambda family: family.exit_code)
    return ERRORS.format(
        families="\n".join(f"| {f.exit_code} | {f.family} | {f.__doc__} |" for f in families),
        codes="\n".join(ERROR_ROW.format(code=code, text=text) for code, text in read_toml(CODES).items()),
    )


def settings() -> str:
    """Return the page of environment variables and of a request's bounds."""
    variables = tables.load(VARIABLES, Variables)
    in_compose = dict(reversed(DEFAULT.findall((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))))
    sections = {}
    for section, rows in variables:
        defaults = {names: row.default or _code(in_compose.get(names, "")) or "-" for names, row in rows.items()}
        lines = (f"| {_names(names)} | {defaults[names]} | {row.meaning} |" for names, row in rows.items())
        sections[section] = _rows("| Variable | Default | Meaning |\n| --- | --- | --- |", lines)
    lines = (f"| `{name}` | {row.default:,} | {row.counts} | {row.status} |" for name, row in limits.LIMITS.items())
    bounds = _rows("| Bound | Default | What it counts | Status |\n| --- | --- | --- | --- |", lines)
    return SETTINGS.format(**sections, bounds=bounds)


def _names(names: str) -> str:
    return ", ".join(name if name == "…" else f"`{name}`" for name in names.split())


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def serve_profiles() -> str:
    """Return the page of serve profiles: the settings of each, with reasons, and the profile that it extends."""
    document = tables.load(profiles.TABLE, profiles.ServeProfiles)
    everything = {**document.bases, **document.profiles}
    table = [f"| [`{name}`](#{name}) | {profile.about} |" for name, profile in document.profiles.items()]
    sections = [_profile(f"## {name}", profile) for name, profile in everything.items()]
    stacks = []
    for stack, own in document.stacks.items():
        stacks += [_profile(f"### {name} on {stack}", profile) for name, profile in own.profiles.items()]
    return PROFILES_PAGE.format(table="\n".join(table), sections="\n\n".join(sections), stacks="\n\n".join(stacks))


def _profile(heading: str, profile: profiles.ServeProfile) -> str:
    entries = {**profile.flags, **profile.environment}
    lines = [f"- {_code(f'{name}={entry.value}'.removesuffix('='))}: {entry.why}" for name, entry in entries.items()]
    base = [f"[`{profile.extends}`](#{profile.extends}), and:\n"] if profile.extends else []
    return "\n".join([f"{heading}\n", *base, *lines])


def schema(document: type[Record], mode: Literal["validation", "serialization"] = "validation") -> str:
    """Return the JSON schema of a document that we write."""
    return json.dumps(document.model_json_schema(mode=mode), indent=2, sort_keys=True) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "../hardware.md": lambda: render(ledger.load()),
    "checks.md": checks,
    "commands.md": commands,
    "errors.md": errors,
    "problems.md": problems,
    "profiles.md": serve_profiles,
    "settings.md": settings,
    "../../sparkforge/bench/result.schema.json": partial(schema, Result),
    "../../sparkforge/plan/plan.schema.json": partial(schema, Plan),
    "../../sparkforge/serve/status.schema.json": partial(schema, StatusReport, "serialization"),
}

# Sparkforge sets these for its own processes or tests; users do not.
INTERNAL = {
    "SPARKFORGE_SERVED_NAMES",
    "SPARKFORGE_SHARED_STATE",
    *("SPARKFORGE_CLUSTER_TOKEN", "SPARKFORGE_CLUSTER_WATCH", "SPARKFORGE_MAX_DEVICE", "SPARKFORGE_OFFLINE"),
    *("SPARKFORGE_OWN_SHM", "SPARKFORGE_SERVER", "SPARKFORGE_TEST_FAST"),
}


def undocumented() -> set[str]:
    """Return the variables without a row that the code names or a Compose file takes from the environment."""
    code = [path for folder in ("sparkforge", "validate") for path in (ROOT / folder).rglob("*.py")]
    compose = [*ROOT.glob("docker-compose*.yml"), ROOT / "deploy" / "stacks.yml"]
    names = {name for path in code for name in re.findall(r"\"(SPARKFORGE_[A-Z_]*[A-Z])\"", path.read_text("utf-8"))}
    names = names.union(*(re.findall(r"\$\{([A-Z_]+)", path.read_text("utf-8")) for path in compose))
    documented = {name for _, rows in tables.load(VARIABLES, Variables) for keys in rows for name in keys.split()}
    return names - INTERNAL - documented


def main(arguments: list[str]) -> None:
    """Write the pages or, with --check, compare them. Raises ProcessError if a page or a variable's row is missing."""
    parser = argparse.ArgumentParser(prog="python -m lab.reference_pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the pages and write nothing")
    check = parser.parse_args(arguments).check
    if missing := undocumented():
        why, fix = ", ".join(sorted(missing)), "add a row to lab/variables.toml, or the name to INTERNAL"
        raise ProcessError("a variable is not documented", why, fix, code="process.checks")
    for name, page in PAGES.items():
        file = FOLDER / name
        if not check:
            write_atomic(file, page())
        elif file.read_text(encoding="utf-8") != page():
            fix = ".venv/bin/python -m lab.reference_pages"
            raise ProcessError(
                f"docs/reference/{name} is out of date", "its source changed", fix, code="process.checks"
            )


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
