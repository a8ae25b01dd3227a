"""Takes out of a result what says who and where: tokens, paths, host names, addresses."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkforge.paths import ROOT

LOOPBACK = r"(?:127\.0\.0\.1|localhost|\[::1\])"
NAMED = r"[\w-]*(?:token|secret|password|passwd|api[_-]?key)"
SECRET = re.compile(NAMED, re.IGNORECASE)
Replacement = str | Callable[[re.Match[str]], str]


def _path(found: re.Match[str]) -> str:
    """Keep a path's last part where it lies deeper than a home: a model is known by it."""
    parts = [part for part in found[0].split("/") if part]
    return f"<path>/{parts[-1]}" if len(parts) > 2 else "<path>"


# In this order: what looks like a secret goes before what only looks like a place.
RULES: tuple[tuple[re.Pattern[str], Replacement], ...] = (
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|nvapi-|xox[abp]-|AKIA)[A-Za-z0-9_\-]{6,}"), "<token>"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), "<token>"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), r"\1 <token>"),
    (re.compile(rf"(?i)\b({NAMED})(\"?\s*[=:]\s*\"?)[^\s,;&\"']+"), r"\1\2<token>"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<address>"),
    (re.compile(rf"(?i)\b(https?|wss?|ftp|ssh)://(?!{LOOPBACK}(?:[:/?#\s\"']|$))[^\s/\"'?#]+"), r"\1://<host>"),
    (re.compile(r"(?<![\w.])(?!127\.0\.0\.1\b)(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d)"), "<address>"),
    (re.compile(r"(?i)(?<![\w:])(?!::1\b)(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{0,4}(?![\w:])"), "<address>"),
    (re.compile(r"(?<![\w.:/>])~?/(?:[\w.+@~%-]+/)*[\w.+@~%-]+/?"), _path),
)


def redact(value: Any) -> Any:
    """Return a copy of a JSON value whose strings, keys too, hold no secret and no place."""
    return _walk(value, _own_words())


def _walk(value: Any, own: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return clean(value, own)
    if isinstance(value, dict):
        return {clean(str(key), own): _under(str(key), each, own) for key, each in value.items()}
    return [_walk(each, own) for each in value] if isinstance(value, list) else value


def _under(key: str, value: Any, own: re.Pattern[str]) -> Any:
    return "<token>" if isinstance(value, str) and value and SECRET.fullmatch(key) else _walk(value, own)


def clean(text: str, own: re.Pattern[str]) -> str:
    """Return one string without them; `own` matches this machine's own names."""
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return own.sub("<host>", text)


def _own_words() -> re.Pattern[str]:
    """Return a pattern for this machine's host name, its user and the checkout's folder name's path."""
    words = {socket.gethostname(), socket.gethostname().partition(".")[0], str(ROOT), str(Path.home())}
    with suppress(KeyError, OSError):
        words.add(getpass.getuser())
    # Whole words only, and not within a hyphened name: a machine called gpt is no part of gpt-oss.
    telling = sorted(words - {"", "/", "root", "localhost"}, key=len, reverse=True)
    return re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in telling) or r"(?!)")
