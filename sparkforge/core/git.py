"""Runs git independently of the caller's repository and of git configurations.

Hooks, `git rebase --exec` and `git bisect run` set variables that override the folder in which git is started. A filter
or an attributes file of the user would change the checked-out files.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sparkforge.core.errors import ProcessError
from sparkforge.core.process import run_unchecked

INSTALL = "sudo apt install git   # then the same command again"
# Certificates for downloads are inherited; the downloaded commit is compared with its pin.
INHERITED_VARIABLES = ("GIT_SSL_CAINFO", "GIT_SSL_CAPATH")
ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
}  # fmt: skip
# git reads the two files from $XDG_CONFIG_HOME/git even if no configuration names them (gitignore(5)).
SETTINGS = ("core.autocrlf=false", "core.attributesFile=/dev/null", "core.excludesFile=/dev/null")


def environment(folder: Path) -> dict[str, str | None]:
    """Return the variables for git in `folder`; None removes one. git finds no repository above `folder`."""
    inherited = dict.fromkeys(
        name for name in os.environ if name.startswith("GIT_") and name not in INHERITED_VARIABLES
    )
    return {**inherited, **ENVIRONMENT, "GIT_CEILING_DIRECTORIES": str(folder.absolute().parent)}


def git(
    folder: Path, *arguments: str | Path, settings: Sequence[str] = (), ends: Sequence[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Run git in `folder` with further `settings` (`-c`) and return the result with its output as text.

    Raises ProcessError, with git's message, if it cannot be started or its exit code is not in `ends`.
    """
    options = [argument for setting in (*SETTINGS, *settings) for argument in ("-c", setting)]
    result = run_unchecked(["git", *options, *arguments], cwd=folder, env=environment(folder), fix=INSTALL)
    if result.returncode not in ends:
        why = (result.stderr or result.stdout).strip() or f"it ended with code {result.returncode}"
        fix = "again   # first follow git's message"
        raise ProcessError(f"git {arguments[0]} failed in {folder}", why, fix, code="process.failed")
    return result


def checkout_git(root: Path, *arguments: str | Path) -> str:
    """Return git's output about the checkout that we run from, whoever owns it. Raises ProcessError."""
    return git(root, *arguments, settings=[f"safe.directory={root}"]).stdout


def checkout_commit(root: Path) -> str:
    """Return the commit that we run from, marked if files differ from it; empty outside a git checkout."""
    try:
        return checkout_git(root, "describe", "--always", "--exclude=*", "--dirty", "--abbrev=12").strip()
    except ProcessError:
        return ""
