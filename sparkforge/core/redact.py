"""Takes out of a text or JSON value what says who and where: tokens, paths, host names, addresses.

Two degrees. `redact` is for results that are published: every path and every host goes. `for_support` is for logs that
somebody must still be able to read: paths that are the same on every machine and hosts that everybody knows stay.

The formats of known tokens are those of `detect-secrets` and of `redact_rules`. Every repetition that is tried at every
position of a text is bounded, possessive, or begins where a word begins: a log may hold a megabyte without a space.
"""

from __future__ import annotations

import getpass
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkforge.core import redact_rules
from sparkforge.core.paths import ROOT
from sparkforge.core.redact_rules import TOKEN, Rules, is_secret_name

VERSION_KEY = re.compile(r"(?:^|[._-])version$")
VERSION = re.compile(r"\d+(?:\.\d+){1,4}[\w.+-]*")
FLAG = re.compile(r"--?([\w-]+)")
NAME_KEYS, VALUE_KEYS = {"name", "key", "variable", "header"}, {"value", "val", "default"}


def redact(value: Any) -> Any:
    """Return a copy of a JSON value whose strings, keys too, hold no secret and no place."""
    return _Walk(redact_rules.strict()).value(value)


def for_support(value: Any) -> Any:
    """Return a copy of a JSON value or a text without secrets, names and homes; what all machines share stays."""
    return _Walk(redact_rules.support()).value(value)


class _Walk:
    """Applies rules to every string of a JSON value, and takes out what its neighbours call a secret."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.own = rules, _own_pattern()

    def value(self, value: Any) -> Any:
        """Return a copy without what the rules take out."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            names_secret = self._names_a_secret(value)
            return {
                self.text(str(key)): self._under(str(key), item, names_secret=names_secret)
                for key, item in value.items()
            }
        return self._list(value) if isinstance(value, list) else value

    def text(self, text: str) -> str:
        """Return one string without them."""
        for pattern, replacement in self.rules:
            text = pattern.sub(replacement, text)
        return self.own.sub("<host>", text)

    def _list(self, values: list[Any]) -> list[Any]:
        """Take out the arguments behind a flag such as --api-key, and the second part of ["api_key", "…"]."""
        if len(values) == 2 and isinstance(values[0], str) and is_secret_name(values[0]) and _is_text(values[1]):
            return [values[0], TOKEN]
        redacted, secret = list[Any](), False
        for item in values:
            text = item if isinstance(item, str) else ""
            if text.startswith("-"):
                flag = FLAG.fullmatch(text)
                secret = flag is not None and is_secret_name(flag[1])
                redacted.append(self.value(item))
            else:
                redacted.append(TOKEN if secret and item else self.value(item))
        return redacted

    def _under(self, key: str, value: Any, *, names_secret: bool) -> Any:
        if is_secret_name(key) or (names_secret and key.lower() in VALUE_KEYS):
            return self._secret(key, value)
        if VERSION_KEY.search(key):  # 9.20.0.48 is cuDNN's, no address
            version = value.get("value") if isinstance(value, dict) else value
            if isinstance(version, str) and VERSION.fullmatch(version):
                return {**self.value(value), "value": version} if isinstance(value, dict) else version
        return self.value(value)

    def _secret(self, key: str, value: Any) -> Any:
        """Return what stands under a secret's name; a number under `first_token` is a measurement."""
        if isinstance(value, dict):
            return {self.text(str(name)): self._secret(key, item) for name, item in value.items()}
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if _is_text(value) or (number and not key.lower().endswith(("token", "signature"))):
            return TOKEN
        return value

    def _names_a_secret(self, value: dict[str, Any]) -> bool:
        """Tell whether an object is such as {"name": "API_KEY", "value": "…"}."""
        names = (item for key, item in value.items() if key.lower() in NAME_KEYS)
        return any(isinstance(name, str) and is_secret_name(name) for name in names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | list) and bool(value)


def _own_pattern() -> re.Pattern[str]:
    """Return a pattern for the host name, the user, the home and the checkout's path."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], str(ROOT), str(Path.home())}
    with suppress(KeyError, OSError):
        names.add(getpass.getuser())
    # Whole names only, and not within a hyphened name: a machine called gpt is no part of gpt-oss.
    telling = sorted(names - {"", "/", "root", "localhost"}, key=len, reverse=True)
    return re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in telling) or r"(?!)")
