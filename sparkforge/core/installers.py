"""Errors of pip and uv as one line: the cause, the next step, and whether to try again.

It needs only the standard library, because `sparkforge.core.bootstrap` runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

RETRY_SECONDS = (3.0, 10.0)  # seconds before the second and the third attempt
LONGEST = 300  # characters of a cause
NETWORK = "again   # first check the network, or set PIP_INDEX_URL to your mirror"
SETTINGS = "pip config list; env | grep -E '^(PIP|UV)_'"


class Refusal(NamedTuple):
    """Why pip or uv failed. `busy`: the same command may succeed later."""

    cause: str
    fix: str
    busy: bool = False


# Progress lines and URLs say nothing about the cause, whatever words are in them.
_PROGRESS = re.compile(
    r"(?m)^\s*(?:Collecting|Downloading|Fetching|Using cached|Looking in|Processing|Requirement already|Resolved"
    r"|Prepar\w+|Installing|Building) .*$"
)
_NAMES = re.compile(r"\b[a-z][a-z+]*://[^\s`'\"<>]+|\b(?:host|for url)[=: (]+[^\s,)]+")
_RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["rules"]
_REQUESTED = re.compile(r"The user requested (\(constraint\) )?(\S+)")


def refusal(output: str) -> Refusal:
    """Return the reason for a failure of pip or uv, from its output without --quiet."""
    if requested := _REQUESTED.findall(output):
        wanted = " and ".join(dict.fromkeys(name for constraint, name in requested if not constraint))
        limits = " and ".join(dict.fromkeys(name for constraint, name in requested if constraint))
        if limits:
            command = [sys.executable, "-m", "pip", "config", "list"]
            listed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout
            place = next((line for line in listed.splitlines() if ".constraint=" in line), "pip config list")
            if value := os.environ.get("PIP_CONSTRAINT"):
                place = f"PIP_CONSTRAINT={value}"
            cause = f"{wanted} is needed, and a constraint of pip's settings demands {limits} ({place})"
            return Refusal(cause[:LONGEST], "remove that constraint, or run with: PIP_CONFIG_FILE=/dev/null")
        return Refusal(f"these requirements exclude each other: {wanted}"[:LONGEST], SETTINGS)
    joined = re.sub(r"\n\s+(?=[a-z`])", " ", _NAMES.sub("URL", _PROGRESS.sub("", output)))  # uv wraps its sentences
    for rule in _RULES:
        if match := re.search(rule["pattern"], joined):
            cause = rule["cause"]
            for number, group in enumerate(match.groups(), 1):
                cause = cause.replace(f"\\{number}", group or "")
            return Refusal(" ".join(cause.split())[:LONGEST], rule.get("fix", SETTINGS), rule.get("busy", False))
    lines = [line.strip() for line in output.splitlines() if line.strip() and "WARNING" not in line]
    errors = [line for line in lines if re.match(r"(?i)error|\S*Error:|cause:", line)] or lines[-1:]
    return Refusal((errors[-1] if errors else "it printed nothing")[:LONGEST], NETWORK)


def pip_files(python: str) -> dict[str, str]:
    """Return the settings in the files that pip reads; none if `python` has no pip, as in an environment made by uv."""
    command = [python, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if not key.startswith(":env:"):
            settings[key.rpartition(".")[2]] = value.strip().strip("'\"")
    return settings


def insist(attempt: Callable[[], str], say: Callable[[str], None], name: str) -> Refusal | None:
    """Run pip or uv by `attempt`, again if the index is busy; return the last failure, or None after success.

    `attempt` returns the output of a failure, and an empty text after success. `name` is for the message.
    """
    for wait in (*RETRY_SECONDS, 0.0):
        output = attempt()
        if not output:
            return None
        refused = refusal(output)
        if not (refused.busy and wait):
            break
        say(f"{name}: {refused.cause}; trying again in {wait:g} s")
        time.sleep(wait)
    return refused
