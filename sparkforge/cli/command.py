"""The parts that every command shares: options, exit codes, and parsing of texts on the command line.

A SparkforgeError is printed in three lines and gives the exit code of its family, never a traceback.
"""

import dataclasses
import functools
import inspect
import io
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.parser.argument import Argument
from invoke.tasks import Task

from sparkforge.core import interrupt, paths
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import SparkforgeError, UsageError, completed
from sparkforge.core.process import call
from sparkforge.core.program import declare

SHORT_FLAGS = {"follow": "f"}  # the same in every command; -h is --help
DEFAULT_STACK = "{default stack}"  # in the text of an option; the help replaces it by the stack's name
DIGITS = 20  # at most, of a whole number on the command line; Python refuses to convert more than 4,300
REPORT = (
    "\nThis is a fault of Sparkforge itself. Please report it with the lines above, the command, and the archive that\n"
    "    ./inv doctor --bundle support.tar.gz\nwrites (without secrets, paths and host names)."
)
STATELESS = ("models", "plan", "audit", "compare")  # functions of commands that need no state folder
LONGEST_WORD = 200  # characters; an error's command leaves longer values out
SIGNALLED = 128  # exit code without the signal's number, as in shells: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP


class CommandTask(Task):  # type: ignore[type-arg]
    """An Invoke task with an example for its help, and without generated short flags."""

    # Invoke has no optional positional arguments. If Invoke runs the commands, `up` has an option instead, and other
    # commands require the argument. With program.py the argument is optional.
    run_by_invoke: ClassVar[bool] = True

    def __init__(
        self, body: Callable[..., None], example: str, texts: Mapping[str, str], *, optional: str = "", rest: str = ""
    ) -> None:
        self.example, self.may_be_left_out, self.rest = example, optional, rest
        # The parameter of --json is `json_`, because a parameter must not hide a module or a builtin.
        self.texts = {name.strip("_").replace("_", "-"): text for name, text in texts.items()}
        self.rest_text = self.texts.pop(rest.replace("_", "-"), "")
        super().__init__(body, auto_shortflags=False, help=dict(self.texts))

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        """Return the parser's arguments. Their help texts are set again, because Invoke removes them at each call."""
        self.help = dict(self.texts)
        arguments: list[Argument] = super().get_arguments(ignore_unknown_help)
        for argument in arguments:
            if self.run_by_invoke and self.name == "up" and argument.name == self.may_be_left_out:
                argument.positional, argument.default = False, ""
        return [argument for argument in arguments if not self.rest or argument.name != self.rest]

    def arg_opts(self, name: str, default: Any, taken_names: set[str]) -> dict[str, Any]:
        """Return Invoke's options for a parameter, with its short flag."""
        options: dict[str, Any] = super().arg_opts(name, default, taken_names)
        if name in SHORT_FLAGS:
            options["names"].append(SHORT_FLAGS[name])
        return options


def task(
    example: str = "", *, options: type | None = None, optional: str = "", rest: str = "", **texts: str
) -> Callable[[Callable[..., None]], CommandTask]:
    """Return a decorator that makes a command of a function; the docstring is the command's help.

    `texts` are the help texts of the parameters. `options` is a dataclass whose fields are made by `option`; the
    function gets an instance as second argument. `optional` names a positional parameter that may be left out and is
    empty then. `rest` names the parameter that takes the list of words after `--`.
    """

    def decorate(function: Callable[..., None]) -> CommandTask:
        body = _with_fields(options, function) if options else function
        shared = {field.name: field.metadata["help"] for field in dataclasses.fields(options)} if options else {}
        return CommandTask(command(body), example, {**shared, **texts}, optional=optional, rest=rest)

    return decorate


def option(text: str, default: Any = "", *, positional: bool = False) -> Any:
    """Return a field of a dataclass of options, with default and help text; a `positional` field has no flag."""
    return dataclasses.field(default=default, metadata={"help": text, "positional": positional})


def _with_fields(options: type, function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with a dataclass's fields as parameters in place of its second parameter, the instance."""
    fields = dataclasses.fields(options)

    @functools.wraps(function)
    def wrapped(context: Context, /, **kwargs: Any) -> None:
        values = {field.name: kwargs.pop(field.name) for field in fields if field.name in kwargs}
        function(context, options(**values), **kwargs)

    signature = inspect.signature(function)
    context, _, *own = signature.parameters.values()
    parameters = [context]
    for field in fields:
        default = inspect.Parameter.empty if field.metadata["positional"] else field.default
        parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default))
    parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapped


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a task's body so that it ends with the exit code of the error it raises, or of the signal that ended it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        """Raise Invoke's Exit, which prints nothing, for every error except a bug in Sparkforge."""
        # stdout escapes characters that it cannot encode: half a surrogate pair, or non-ASCII characters in LANG=C.
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            with interrupt.caught():
                _close_state(function.__name__)
                function(*args, **kwargs)
        except SparkforgeError as error:
            error.fix = whole_command(error.fix, wrapped, kwargs)
            show_error(error)
            raise Exit(code=error.exit_code) from None
        except KeyboardInterrupt as error:
            number = getattr(error, "number", signal.SIGINT)
            say(f"ended by {signal.Signals(number).name}; the same command continues where it can")
            raise Exit(code=SIGNALLED + number) from None
        except Exit:
            raise
        except Exception as error:
            if isinstance(error, BrokenPipeError) and nobody_reads():
                raise
            declared = declare(error)
            if declared is None:
                error.add_note(REPORT)
                raise
            show_error(declared)
            raise Exit(code=declared.exit_code) from None
        if number := interrupt.ending():  # the command handled the interrupt itself, such as `logs`
            raise Exit(code=SIGNALLED + number)

    return wrapped


def _close_state(function: str) -> None:
    """Close the state folder to other users. Raises StorageError if it cannot be used, unless it is not needed."""
    if function not in STATELESS:
        paths.require_state()
        if paths.state().is_dir():
            paths.secure_state()


def whole_command(fix: str, function: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """Return an error's `fix` as a complete command (see `core.errors`), from the called command.

    `values` maps the parameters of the called command's `function` to values. Long or unprintable values are left out.
    """
    from sparkforge.cli import namespace  # it imports this module

    task_name = next((name for name in namespace.task_names if namespace[name].body is function), "")
    collection, _, last = task_name.rpartition(".")
    is_default = collection and namespace.subcollection_from_path(collection).default == last
    name = f"./inv {collection if is_default else task_name}"

    def change(option: str, value: str | None) -> str:
        parameter = next((key for key in values if _flag(key) == option), "")
        if not parameter:
            return f"{name} --help"
        changed = dict(values)
        default = inspect.signature(function).parameters[parameter].default
        changed[parameter] = default if value is None else value or True
        return " ".join([name, *_words(function, changed, "" if value is None else parameter)])

    return completed(fix, " ".join([name, *_words(function, values)]), change) if task_name else fix


def _flag(parameter: str) -> str:
    return f"--{parameter.strip('_').replace('_', '-')}"


def _words(function: Callable[..., Any], values: Mapping[str, Any], kept: str = "") -> list[str]:
    """Return a command's parameters as words of a shell, without options that have their default, except `kept`."""
    words, rest = list[str](), list[str]()
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        value, flag = values.get(parameter.name, parameter.default), _flag(parameter.name)
        text, is_default = str(value), value == parameter.default and parameter.name != kept
        if isinstance(value, Sequence) and not isinstance(value, str):
            rest = ["--", *map(str, value)] if value else []
        elif parameter.default is inspect.Parameter.empty:
            words += [text] if value else []
        elif isinstance(value, bool):
            if value != parameter.default:
                words.append(flag if value else flag.replace("--", "--no-", 1))
        elif not is_default and text.isprintable() and len(text) < LONGEST_WORD:
            words += [flag, text]
    return [shlex.quote(word) for word in (*words, *rest)]


def in_laboratory(module: str, *words: str) -> None:
    """Run a program of lab/, which only a clone has, and end with its exit code."""
    if code := call([sys.executable, "-m", f"lab.{module}", *words], cwd=paths.ROOT, env={}):
        raise Exit(code=code)


def nobody_reads() -> bool:
    """Return whether stdout or stderr is a pipe whose other end is closed, as in `./inv logs | head`."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def caller_path(text: str) -> str:
    """Return a path on the command line as an absolute path, from the caller's folder (INV_CWD); empty stays empty."""
    return str(Path(os.environ.get("INV_CWD") or Path.cwd()) / paths.typed(text)) if text else ""


def name_or_path(text: str, names: Iterable[str] = ()) -> str:
    """Return `text` if it is one of `names` or no file in the caller's folder, else its absolute path."""
    if text in names:
        return text
    path = caller_path(text)
    return path if "/" in text or (path and Path(path).exists()) else text


def caller_paths(text: str) -> list[Path]:
    """Return the paths between commas, absolute, as `caller_path` does."""
    return [Path(caller_path(part)) for part in listed(text)]


def whole_number(flag: str, text: str) -> int:
    """Return `text` as an int. Raises UsageError; Invoke's own conversion would give a traceback."""
    if re.fullmatch(r"[+-]?\d+", text, re.ASCII) and len(text) <= DIGITS:  # int() also takes 1_000 and non-ASCII digits
        return int(text)
    raise UsageError(f"{flag} {text[: 2 * DIGITS]!r} is not valid", "it takes a whole number", "--help")


def listed(text: str) -> list[str]:
    """Return the non-empty words between commas."""
    return [word for part in text.split(",") if (word := part.strip())]
