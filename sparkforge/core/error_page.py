"""`docs/reference/errors.md`, made from sparkforge.core.errors; sparkforge.cli.reference_pages writes it."""

from __future__ import annotations

from sparkforge.core.errors import CODES, SparkforgeError

PAGE = """# Errors

Every error has three parts: what failed, why, and the next command to run. Its code stands in brackets behind the first
part:

```text
✗ vLLM's wheel is not the file that was pinned [integrity.hash]
  why:  sha256 is 0f3a…, wanted 9c41…
  next: ./inv build --only sources
```

The exit code tells scripts which family the error belongs to; the code tells the cases of a family apart. Codes do not
change between releases. Each has an anchor on this page, such as
[`errors.html#integrity.hash`](#integrity.hash).

This page is made by `python -m sparkforge.cli.reference_pages`.

## Families

| exit code | family | class | meaning |
| ---: | --- | --- | --- |
{families}

## Codes

| code | exit code | meaning |
| --- | ---: | --- |
{codes}
"""
CODE = '| <a id="{code}"></a>`{code}` | {exit_code} | {text} |'


def families() -> list[type[SparkforgeError]]:
    """Return every family of errors, in the order of exit codes."""
    return sorted(SparkforgeError.__subclasses__(), key=lambda family: family.exit_code)


def page() -> str:
    """Return the page as it must be."""
    exit_codes = {family.family: family.exit_code for family in families()}
    return PAGE.format(
        families="\n".join(f"| {f.exit_code} | {f.family} | `{f.__name__}` | {f.__doc__} |" for f in families()),
        codes="\n".join(
            CODE.format(code=code, exit_code=exit_codes[code.partition(".")[0]], text=text)
            for code, text in CODES.items()
        ),
    )
