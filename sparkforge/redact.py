"""Takes out of a text or JSON value what says who and where: tokens, paths, host names, addresses.

Two degrees. `redact` is for results that are published: every path and every host goes. `for_support` is for logs that
somebody must still be able to read: paths that are the same on every machine and hosts that everybody knows stay.
"""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkforge.paths import ROOT

TOKEN = "<token>"  # noqa: S105 - what stands in a token's place
LOOPBACK = r"(?:127\.0\.0\.1|localhost|\[::1\])"
# Whose addresses stand in every log and say nothing about its owner.
PUBLIC = (
    r"(?:github\.com|huggingface\.co|docs\.vllm\.ai|docs\.docker\.com|docs\.nvidia\.com|developer\.nvidia\.com"
    r"|pytorch\.org|download\.pytorch\.org|pypi\.org|nanobind\.readthedocs\.io|openaipublic\.blob\.core\.windows\.net)"
)
# Every repetition that is tried at each place of a text is bounded: a log may hold a megabyte without a space.
NAMED = (
    r"[\w-]{0,64}(?:token|secret|passw(?:or)?d|passwd|passphrase|credentials?|signature"
    r"|(?:api|access|private|secret)[_-]?key(?:[_-]?id)?)"
)
SECRET = re.compile(NAMED, re.IGNORECASE)
SECRET_FLAG = re.compile(rf"--?{NAMED}", re.IGNORECASE)
VERSION_KEY = re.compile(r"(?:^|[._-])version$")
VERSION = re.compile(r"\d+(?:\.\d+){1,4}[\w.+-]*")
# Folders whose contents are the same for everybody, in our container and on a plain Linux.
COMMON = (
    *("/usr/", "/opt/venv/", "/lib/", "/lib64/", "/etc/", "/proc/", "/sys/", "/dev/", "/run/", "/bin/", "/models/"),
    *("/var/cache/sparkforge/", "/var/run/docker.sock/", "/v1/"),
)
PACKAGES = re.compile(r".*?/((?:site|dist)-packages/.*)")
Replacement = str | Callable[[re.Match[str]], str]
Rules = tuple[tuple[re.Pattern[str], Replacement], ...]


def _path(found: re.Match[str]) -> str:
    """Keep a path's last part where it lies deeper than a home: a model is known by it."""
    parts = [part for part in found[0].split("/") if part]
    return f"<path>/{parts[-1]}" if len(parts) > 2 else "<path>"


def _support_path(found: re.Match[str]) -> str:
    """Keep also what lies in a checkout, in a Python package, or where every machine has the same."""
    path = found[0]
    if path.count("/") == 1 and path[0] == "/":  # a route of the API, or a top folder
        return path
    if f"{path.rstrip('/')}/".startswith(COMMON):
        return path
    if path.startswith(f"{ROOT}/") and len(ROOT.parts) > 1:
        return f"<checkout>/{path.removeprefix(f'{ROOT}/')}"
    inside = PACKAGES.fullmatch(path)
    return f"<path>/{inside[1]}" if inside else _path(found)


def _address(found: re.Match[str]) -> str:
    """Replace what is an IP address, unless it means this very machine or none."""
    try:
        address = ipaddress.ip_address(found[0].partition("%")[0])
    except ValueError:
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "<address>"


def _hosts(kept: str) -> re.Pattern[str]:
    return re.compile(rf"(?i)\b(https?|wss?|ftp|ssh)://(?!{kept}(?:[:/?#\s\"'>)\]]|$))[^\s/\"'?#]+")


# In this order: what looks like a secret goes before what only looks like a place.
SECRETS: Rules = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), TOKEN),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abp]-|AKIA)[A-Za-z0-9_\-]{6,}"), TOKEN),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), TOKEN),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {TOKEN}"),
    (re.compile(rf"(?i)(--?{NAMED})(\s+|['\"],\s*['\"])[^\s,;&\"']+"), rf"\1\2{TOKEN}"),
    (re.compile(rf"(?i)({NAMED})(['\"]?\s*[=:]\s*[\[(]?\s*['\"]?)[^\s,;&\"'\])]+"), rf"\1\2{TOKEN}"),
    (re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+"), "<address>"),
)
MACHINES: Rules = (
    (re.compile(r"(?i)(?<![\w:-])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:-])"), "<address>"),
    (
        re.compile(
            r"(?i)(?<![\w.])(?=[0-9a-f]{0,4}:[0-9a-f]{0,4}:)[0-9a-f:]{2,39}(?:(?:\d{1,3}\.){3}\d{1,3})?(?:%\w+)?(?![\w:]|\.\d)"
        ),
        _address,
    ),
    (re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d)"), _address),
    (re.compile(r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4,12}){4}"), "<gpu>"),
    (re.compile(r"(?m)^((?:\([^)\n]*\) *)*)[\w.-]+(?=:\d+:\d+ \[\d+\] )"), r"\1<host>"),  # NCCL: HOST:PID:TID [GPU]
    (
        re.compile(r"\b(?=[\w.-]{0,80}[\d-])[\w-]{1,63}(?:\.[\w-]{1,63}){0,4}\.(?:local|lan|internal|home\.arpa)\b"),
        "<host>",
    ),
)
# A home wherever it stands (-I/home/anna/include, file:///home/anna), any other path where one can begin.
PATHS = re.compile(
    r"/(?:home|Users|root|media|mnt)(?:/[\w.+@~%-]+)+/?|(?:(?<![\w./>])|(?<=file://))~?/(?:[\w.+@~%-]+/)*[\w.+@~%-]+/?"
)
STRICT: Rules = (*SECRETS, (_hosts(LOOPBACK), r"\1://<host>"), *MACHINES, (PATHS, _path))
SUPPORT: Rules = (
    *SECRETS,
    # The middle of a key whose first line was cut off: base64 alone on its line. A sha256 has no capitals.
    (re.compile(r"(?m)^(?=[^A-Z\n]{0,80}[A-Z])[A-Za-z0-9+/=]{60,80}$"), TOKEN),
    (_hosts(rf"(?:{LOOPBACK}|{PUBLIC})"), r"\1://<host>"),
    *MACHINES,
    (PATHS, _support_path),
)


def redact(value: Any) -> Any:
    """Return a copy of a JSON value whose strings, keys too, hold no secret and no place."""
    return _walk(value, STRICT, _own_words())


def for_support(value: Any) -> Any:
    """Return a copy of a JSON value or a text without secrets, names and homes; what all machines share stays."""
    return _walk(value, SUPPORT, _own_words())


def _walk(value: Any, rules: Rules, own: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return clean(value, own, rules)
    if isinstance(value, dict):
        return {clean(str(key), own, rules): _under(str(key), each, rules, own) for key, each in value.items()}
    return _list(value, rules, own) if isinstance(value, list) else value


def _list(values: list[Any], rules: Rules, own: re.Pattern[str]) -> list[Any]:
    """Take out the word behind a flag such as --api-key, too."""
    before = [None, *values][: len(values)]
    return [
        TOKEN if isinstance(flag, str) and SECRET_FLAG.fullmatch(flag) and each else _walk(each, rules, own)
        for flag, each in zip(before, values, strict=True)
    ]


def _under(key: str, value: Any, rules: Rules, own: re.Pattern[str]) -> Any:
    if value and SECRET.fullmatch(key):
        return TOKEN if isinstance(value, str | list) else _walk(value, rules, own)
    if VERSION_KEY.search(key):  # 9.20.0.48 is cuDNN's, no address
        told = value.get("value") if isinstance(value, dict) else value
        if isinstance(told, str) and VERSION.fullmatch(told):
            return {**_walk(value, rules, own), "value": told} if isinstance(value, dict) else told
    return _walk(value, rules, own)


def clean(text: str, own: re.Pattern[str], rules: Rules = STRICT) -> str:
    """Return one string without them; `own` matches this machine's own names."""
    for pattern, replacement in rules:
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
