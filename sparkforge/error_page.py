"""`docs/errors.md`, made from the classes of `sparkforge.errors`: `python3 -m sparkforge.errors > docs/errors.md`."""

from __future__ import annotations

from sparkforge.errors import SparkforgeError

PAGE = """# Errors

Every refusal has three parts: what failed, why, and the next command to run. The exit code tells scripts which kind
it was. Made by `python3 -m sparkforge.errors > docs/errors.md`; a test keeps them equal.

| exit code | error | meaning |
| ---: | --- | --- |
{rows}
"""


def all_errors() -> list[type[SparkforgeError]]:
    """Return every error class, in exit-code order."""
    return sorted({SparkforgeError, *SparkforgeError.__subclasses__()}, key=lambda c: c.exit_code)


def page() -> str:
    """Return `docs/errors.md` as it must be."""
    rows = "\n".join(f"| {c.exit_code} | `{c.__name__}` | {(c.__doc__ or '').strip()} |" for c in all_errors())
    return PAGE.format(rows=rows)
