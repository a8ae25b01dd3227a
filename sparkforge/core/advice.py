"""The command that an error advises: whole, or a change of the called one that is completed here (see core.errors)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

CHANGE = re.compile(
    r"(?:(?P<again>again)|(?P<without>without )?(?P<option>--[a-z][a-z-]*)(?:[ =](?P<value>'[^']*'|[^\s;#'-]\S*))?"
    r"|unset (?P<unset>\w+)|(?P<set>[A-Z][A-Z_\d]*=(?:\"[^\"]*\"|'[^']*'|[^\s;'\"]*)))(?P<remark>   # .*)?",
    re.DOTALL,
)


def on(command: str, path: Path | str, remark: str = "") -> str:
    """Return a command on a path, which is quoted for a shell."""
    return f"{command} {shlex.quote(str(path))}" + (f"   # {remark}" if remark else "")


def with_remark(fix: str, remark: str) -> str:
    """Return an advised command with a further remark."""
    return f"{fix}; {remark}" if "   # " in fix else f"{fix}   # {remark}"


def completed(fix: str, command: str, change: Callable[[str, str | None], str] | None = None) -> str:
    """Return an error's `fix` as a whole command; one that is whole already stays as it is.

    `command` is the called one. `change(option, value)` returns it with another option: `value` is empty for a flag
    without a value, None for an option to leave out. By default the option is put behind the command.
    """
    advice = CHANGE.fullmatch(fix)
    if advice is None:
        return fix
    if option := advice["option"]:
        value = None if advice["without"] else (advice["value"] or "").strip("'")
        written = advice[0].removesuffix(advice["remark"] or "")
        command = change(option, value) if change else command if value is None else f"{command} {written}"
    elif variable := advice["unset"]:
        command = f"env -u {variable} {command}"
    elif advice["set"]:
        command = f"{advice['set']} {command}"
    return command + (advice["remark"] or "")
