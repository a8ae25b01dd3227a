"""python -m lab.names: check that no code of the product names a family of models. `./inv check` runs it.

Families are rows of tables. A family's name in code would have to change with each new row.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from sparkforge.core.paths import ROOT
from sparkforge.plan import families

# These write random or tiny checkpoints of one family.
WRITERS = {"sparkforge/models/harmony.py", "sparkforge/models/tiny.py", "validate/facts/layers_child.py"}


def names() -> Iterator[str]:
    """Yield the names that identify a family: its name, model type, architectures, methods and backends."""
    for name, row in families.load().items():
        yield from (name, row.model_type, row.tiny, row.served, *row.architectures)
        if row.experts:
            yield from (method for method in row.experts.methods if "_" in method)  # mxfp4 is a format, too
            yield from (backend for by_stack in row.experts.backends.values() for backend in by_stack.values())


def code_strings(text: str) -> Iterator[str]:
    """Yield the string constants of a module except docstrings and sentences."""
    tree = ast.parse(text)
    bodies = (n.body for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from () if " " in node.value else (node.value,)


def problems(files: Iterable[Path]) -> Iterator[str]:
    """Yield each string of the files' code that names a family."""
    words = "|".join({re.escape(name) for name in names() if name})
    pattern = re.compile(rf"(?<![\w-])({words})(?![\w-])")
    for file in files:
        for text in filter(pattern.search, code_strings(file.read_text(encoding="utf-8"))):
            yield f"{file}: {text!r} names a family of models; a row of its table says it"


def main() -> int:
    """Print the problems and return the exit code."""
    files = [file for folder in ("sparkforge", "validate") for file in sorted((ROOT / folder).rglob("*.py"))]
    found = [*problems(file for file in files if str(file.relative_to(ROOT)) not in WRITERS)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
