"""The command line of `./inv`: help, the list of commands, and errors. Invoke parses and runs the commands."""

import difflib
import os
import re
import shlex
import shutil
import signal
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from invoke.config import Config
from invoke.exceptions import Exit, ParseError
from invoke.executor import Executor
from invoke.parser import Parser
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext

import sparkforge
from sparkforge.cli import namespace
from sparkforge.cli.command import DEFAULT_STACK, SIGNALLED, CommandTask
from sparkforge.core import paths
from sparkforge.core.console import echo, show_error
from sparkforge.core.errors import SparkforgeError, UsageError

CommandTask.run_by_invoke = False  # with _parse, users may omit a command's optional positional argument
# The groups of `./inv --list`, by the user's job. `NAME.*` stands for all commands of a collection that no group names.
GROUPS = {
    "serve": ("up", "down", "status", "logs", "chat", "run", "rollback", "service.*", "cluster.*", "max.*"),
    "build": ("build", "build.*", "patch", "dev.*", "audit", "image.*"),
    "models": ("models", "pull", "list", "rm", "plan"),
    "measure": ("bench.perf", "bench.*"),
    "diagnose": ("doctor", "validate", "qualify", "qualify.*"),
    "maintain": ("clean-cache", "bundle", "bundle.*", "pins.lock", "test", "check"),
}
OTHER_NAMES = {"ps": "status", "model.fetch": "pull"}
IN_A_CLONE = ("pins.lock", "test", "check", "qualify.accept", "bench.profile")  # a wheel lacks their files
DAILY = ("up", "chat", "status", "logs", "down", "build", "doctor", "bench.perf")
HELP = ("-h", "--help")
ALONE = {"--fleet": "fleet.toml"}  # option → its value if none follows
WIDEST = 100  # columns
SHELLS = {"bash": "", "zsh": "autoload -U compinit bashcompinit && compinit && bashcompinit\n"}
COMPLETION = """{before}_sparkforge() {{
    COMPREPLY=($(compgen -W "$("$1" --complete -- "${{COMP_WORDS[@]:1:$COMP_CWORD}}" 2> /dev/null)" -- "$2"))
}}
complete -F _sparkforge -o default ./inv inv sparkforge
"""
USAGE = """Usage: ./inv COMMAND [OPTIONS]

{commands}

  ./inv --list            every command
  ./inv COMMAND --help    its options and an example
  ./inv --version         the version
  eval "$(./inv --print-completion-script bash)"   completion; or zsh

Example:
  ./inv up && ./inv chat "Hello"
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        try:
            return run(list(arguments))
        except SparkforgeError as error:
            show_error(error)
            return error.exit_code
        except Exit as error:
            return error.code
    except BrokenPipeError:  # as in `./inv --list | head`: end with the code of SIGPIPE, like other programs
        null = os.open(os.devnull, os.O_WRONLY)  # for later output of Python, such as the flush at exit
        for number in (1, 2):
            os.dup2(null, number)
        return SIGNALLED + signal.SIGPIPE


def run(arguments: list[str]) -> int:
    """Print help or the list, or run commands. Raises UsageError, and Exit with a command's exit code."""
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    rest = arguments[separator + 1 :] if "--" in arguments else None
    arguments = arguments[:separator]
    contexts = {str(context.name): context for context in namespace.to_contexts()}
    for context in tuple(contexts.values()):
        contexts.update(dict.fromkeys(context.aliases, context))
    contexts.update({name: contexts[command] for name, command in OTHER_NAMES.items()})
    if arguments[1:] and arguments[0] not in contexts and (name := ".".join(arguments[:2])) in contexts:
        arguments = [name, *arguments[2:]]  # also accept `service install` for `service.install`
    arguments = [OTHER_NAMES.get(argument, argument) for argument in arguments[:1]] + arguments[1:]
    if help_flags := [argument for argument in arguments if argument in HELP]:
        command = next((argument for argument in arguments if argument not in help_flags), "")
        echo(command_help(contexts[require(command, contexts)], command) if command else overview(), end="")
    elif not arguments:
        echo(overview(), end="")
    elif (text := _information(arguments, rest, contexts)) is not None:
        echo(text, end="")
    else:
        name = require(arguments[0], contexts)
        if paths.INSTALLED and contexts[name].name in IN_A_CLONE:
            why = "it is for the development of Sparkforge, and an installation lacks its files"
            fix = f"less {paths.ROOT}/docs/guide/develop.md   # in a clone"
            raise UsageError(f"./inv {name} is for a clone of Sparkforge", why, fix)
        _require_options(contexts[name], arguments[1:], contexts)
        try:
            parsed = _parse(_with_two_dashes(arguments, contexts))
        except ParseError as error:
            raise usage_error(error, contexts, arguments) from None
        if rest is not None:
            command = namespace[parsed[-1].name]
            if not isinstance(command, CommandTask) or not command.rest:
                why, fix = "it starts no program that takes them", f"./inv {parsed[-1].name} --help"
                raise UsageError(f"./inv {parsed[-1].name} takes no words after --", why, fix)
            argument = Argument(name=command.rest)
            argument.set_value(rest, cast=False)
            parsed[-1].add_arg(argument)
        Executor(namespace, Config(lazy=True)).execute(*parsed)
    return 0


def _information(arguments: list[str], rest: list[str] | None, contexts: Mapping[str, ParserContext]) -> str | None:
    """Return the output of an option without a command; None if there is no such option. Raises UsageError."""
    value = arguments[1] if arguments[1:] else ""
    match arguments[0]:
        case "--version":
            return f"sparkforge {sparkforge.__version__}\n"
        case "--list":
            return listing(value)
        case "--complete":
            return "".join(f"{word}\n" for word in completions(rest or [""], contexts))
        case "--print-completion-script":
            if value in SHELLS:
                return COMPLETION.format(before=SHELLS[value])
            fix = "./inv --print-completion-script bash"
            raise UsageError(f"there is no completion for {value or 'no shell'}", f"choose {' or '.join(SHELLS)}", fix)
    return None


def completions(words: Sequence[str], contexts: Mapping[str, ParserContext]) -> list[str]:
    """Return completions of the last word: commands, or options of the preceding command. The shell completes files."""
    command = next((word for word in reversed(words[:-1]) if word in contexts), "")
    if command:
        return sorted(contexts[command].flag_names()) if words[-1].startswith("-") else []
    return [*_names(), "--list", "--version", "--help"]


def _parse(arguments: list[str]) -> list[ParserContext]:
    """Return the arguments parsed by Invoke; a missing optional positional argument is empty. Raises ParseError."""
    try:
        return list(Parser(contexts=namespace.to_contexts()).parse_argv(arguments))
    except ParseError as error:
        context = error.context
        command = namespace[context.name] if context and context.name else None
        missing = [argument.name for argument in context.missing_positional_args] if context else []
        is_left_out = isinstance(command, CommandTask) and missing == [command.may_be_left_out]
        if not is_left_out or "positional arguments" not in str(error):
            raise
        return list(Parser(contexts=namespace.to_contexts()).parse_argv([*arguments, ""]))


def _require_options(context: ParserContext, arguments: list[str], contexts: dict[str, ParserContext]) -> None:
    """Raise UsageError for an unknown option of a command, because Invoke would parse it as a positional argument."""
    is_value = False
    for word in _with_two_dashes([str(context.name), *arguments], contexts)[1:]:
        if is_value:
            is_value = False
        elif word.startswith("--"):
            name, _, value = word.partition("=")
            if name not in {*context.flags, *context.inverse_flags}:
                raise usage_error(ParseError(f"No idea what '{word}' is!", context), contexts, arguments)
            is_value = not value and name in context.flags and context.flags[name].takes_value
        else:
            context = contexts.get(word, context)


def _with_two_dashes(arguments: Iterable[str], contexts: Mapping[str, ParserContext]) -> list[str]:
    """Return the arguments with `-isl` as `--isl`, as in the gpt-oss competition; a short flag such as -f stays."""
    changed, short = list[str](), set[str]()
    for argument in arguments:
        if argument in contexts:
            short = {f"-{name}" for option in contexts[argument].args.values() for name in option.nicknames}
        long = re.match(r"-[a-z][a-z]", argument) and argument[:2] not in short
        changed.append(f"-{argument}" if long else argument)
    for number, (word, following) in enumerate(zip(changed, [*changed[1:], "-"], strict=True)):
        if word in ALONE and following.startswith("-"):
            changed[number] = f"{word}={ALONE[word]}"
    return changed


def require(name: str, names: Iterable[str]) -> str:
    """Return `name` if it is in `names`. Raises UsageError with the nearest name."""
    if name in names:
        return name
    if name.startswith("-"):
        why = "an option follows its command; the only options without a command are --list, --version and --help"
        raise UsageError(f"there is no option {name}", why, "./inv --help")
    raise UsageError(f"there is no command {name!r}", *_nearest(name, names, "./inv --list", "./inv "))


def usage_error(error: ParseError, contexts: dict[str, ParserContext], arguments: Sequence[str]) -> UsageError:
    """Return the error for a command line that Invoke's parser refused."""
    command = [*error.context.aliases, str(error.context.name)][0] if error.context else ""
    help_command = f"./inv {command} --help"
    text = str(error)
    if unknown := re.fullmatch(r"No idea what '(.*)' is!", text, re.DOTALL):
        word = unknown[1]
        if not word.startswith("-"):
            if (inner := f"{command}.{word}") in contexts:
                return UsageError(f"{word!r} has no meaning here", "a dot joins the two words", f"./inv {inner}")
            why = f"./inv {command} takes no such argument, and there is no such command; quote a text with spaces"
            return UsageError(f"{word!r} has no meaning here", why, help_command)
        why, fix = _nearest(name := word.partition("=")[0], contexts[command].flags, help_command, "")
        if nearest := contexts[command].flags.get(fix):
            place = next((place for place, typed in enumerate(arguments) if typed in (word, word[1:])), len(arguments))
            words = [word.replace(name, fix, 1), *arguments[place + 1 : place + 2]]
            words = words[: 2 if nearest.takes_value and name == word else 1]
            is_whole = not nearest.takes_value or name != word or len(words) == 2
            fix = f"./inv {command} {shlex.join(words)}" if is_whole else help_command
        return UsageError(f"./inv {command} has no option {word}", why, fix)
    if missing := re.search(r"did not receive required positional arguments: (.*)", text):
        names = " ".join(name.strip("'").upper() for name in missing[1].split(", "))
        return UsageError(f"./inv {command} needs {names}", "it was not on the command line", help_command)
    if value := re.match(r"Flag <Argument: ([^ >]+)", text):
        why = "it takes a value" if "needed value" in text else "it takes no value"
        return UsageError(f"--{value[1]} cannot be read", why, help_command)
    return UsageError("the command line cannot be read", text, help_command)


def _nearest(word: str, names: Iterable[str], otherwise: str, prefix: str) -> tuple[str, str]:
    """Return the reason why a word is refused, and the command to run instead, with the nearest name if one is near."""
    if matches := difflib.get_close_matches(word, sorted(names), n=1, cutoff=0.5):
        return f"the nearest is {matches[0]}", f"{prefix}{matches[0]}"
    return "nothing has a similar name", otherwise


def overview() -> str:
    """Return the daily commands and how to see all of them."""
    return USAGE.format(commands=_table([(name, _summary(name)) for name in DAILY]))


def listing(group: str = "") -> str:
    """Return all commands by job, or those of one group or collection, such as `bench`. Raises UsageError."""
    if group:
        inner = [name for name in _names() if f"{name}.".startswith(f"{group}.")]
        names = expanded(GROUPS[group]) if group in GROUPS else inner
        if not names:
            groups = [*GROUPS, *namespace.collections]
            raise UsageError(f"there is no group {group!r}", *_nearest(group, groups, "./inv --list", "./inv --list "))
        return _table([(name, _summary(name)) for name in names]) + "\n"
    width = max(len(name) for commands in GROUPS.values() for name in commands)
    lines = []
    for title, commands in GROUPS.items():
        folded = {name: ", ".join(entry.rpartition(".")[2] for entry in expanded((name,))) for name in commands}
        rows = [(name, folded[name] if name.endswith("*") else _summary(name)) for name in commands]
        lines += [f"{title}:", _table(rows, width)]
    return "\n".join([*lines, "./inv --list bench lists bench.*; ./inv COMMAND --help shows options"]) + "\n"


def _names() -> list[str]:
    """Return every command's name; a collection's default command has the collection's name."""
    names = []
    for name in namespace.task_names:
        collection, _, task = name.rpartition(".")
        default = collection and namespace.subcollection_from_path(collection).default == task
        names.append(collection if default else name)
    return names


def expanded(names: Iterable[str]) -> list[str]:
    """Return `names` with `NAME.*` replaced by the commands of that collection that no group names."""
    listed = {name for group in GROUPS.values() for name in group}
    expanded = list[str]()
    for name in names:
        inner = [entry for entry in _names() if entry.startswith(name[:-1]) and entry not in listed]
        expanded += inner if name.endswith(".*") else [name]
    return expanded


def _summary(name: str) -> str:
    return (namespace[name].__doc__ or "").strip().partition("\n")[0].removesuffix(".")


def command_help(context: ParserContext, name: str) -> str:
    """Return the usage, description, options and example of a command, called as `name`."""
    command = namespace[context.name]
    positional = [argument for argument in context.args.values() if argument.positional]
    optional, rest = (command.may_be_left_out, command.rest_text) if isinstance(command, CommandTask) else ("", "")
    rows, places = [], ""
    for argument in positional:
        word = argument.names[0].upper()
        places += f" [{word}]" if argument.name == optional else f" {word}"
        rows.append((word, argument.help or ""))
    for argument in dict.fromkeys(context.args.values()):
        if argument in positional:
            continue
        flags = [f"--{argument.names[0]}", *(f"-{nickname}" for nickname in argument.nicknames)]
        value = " VALUE" if argument.takes_value else ""
        text = argument.help or ""
        if DEFAULT_STACK in text:
            from sparkforge import pins  # takes 100 ms and is not needed for the list of commands

            text = text.replace(DEFAULT_STACK, pins.load().default)
        text += f" (default: {argument.default})" if argument.takes_value and argument.default else ""
        rows.append((", ".join(flags) + value, text))
    rows.append(("--help, -h", "print this"))
    if rest:
        rows.append(("-- WORDS", rest))
    parts = [
        f"Usage: ./inv {name}{places} [OPTIONS]{' [-- WORDS]' if rest else ''}",
        "\n\n".join(textwrap.fill(" ".join(text.split()), _width()) for text in (command.__doc__ or "").split("\n\n")),
        _table(rows),
    ]
    if isinstance(command, CommandTask) and command.example:
        parts.append(f"Example:\n  {command.example}")
    return "\n\n".join(parts) + "\n"


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST)


def _table(rows: Sequence[tuple[str, str]], left: int = 0) -> str:
    left = left or min(max(len(name) for name, _ in rows), 28)
    indent = " " * (left + 4)
    lines = []
    for name, text in rows:
        gap = "\n" + indent if len(name) > left else " " * (left + 2 - len(name))
        wrapped = textwrap.wrap(text, _width() - left - 4) or [""]
        lines.append(f"  {name}{gap}" + f"\n{indent}".join(wrapped))
    return "\n".join(line.rstrip() for line in lines)
