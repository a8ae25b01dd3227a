"""Explain messages of compilers that do not say what is wrong, by `diagnosis.toml`."""

from __future__ import annotations

import re
from pathlib import Path

from sparkforge.core.documents import read_toml
from sparkforge.core.errors import ProcessError

TABLE = Path(__file__).with_name("diagnosis.toml")


def explained(error: ProcessError) -> ProcessError:
    """Return the error with cause and fix in place of what a compiler printed, if we know them; else as it is."""
    for row in read_toml(TABLE)["message"]:
        if match := re.search(row["pattern"], error.why):
            why, fix = (row[part].format(match=match[0], **match.groupdict()) for part in ("why", "fix"))
            return ProcessError(error.what, why, fix, code="process.failed")
    return error
