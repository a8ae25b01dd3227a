"""python -m lab.weigh [COMMIT …]: the size of the tree, a column for each commit; `.` is the working tree.

Lines are those of Python, CUDA and Mojo files, with comments and blanks; the words of the documentation are those of
docs/, README.md, CONTRIBUTING.md, SECURITY.md and CHANGELOG.md. A private function counts as called once if its name
occurs once outside its definition in its house, a group of folders. Parameters count without self and cls.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table

from sparkforge.core.console import console
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run
from sparkforge.core.program import exit_code

HOUSES: Mapping[str, tuple[str, ...]] = {
    "product": ("sparkforge", "validate"),
    "library": ("spark_mxfp4",),
    "lab": ("lab",),
    "tests": ("tests", "lab/tests", "spark_mxfp4/tests"),
}
CODE = {".py", ".cu", ".cuh", ".mojo"}
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
MOST_PARAMETERS = 6
COMMANDS = "import tasks; print(len(tasks.namespace.to_contexts()))"


def house(path: Path) -> str:
    """Return the house of a file, or "". The longest folder decides, so lab/tests belongs to the tests."""
    folders = [(folder, name) for name, listed in HOUSES.items() for folder in listed if path.is_relative_to(folder)]
    return max(folders, key=lambda pair: len(pair[0]), default=("", ""))[1]


def lines(files: Iterable[Path]) -> int:
    """Return how many lines the files have."""
    return sum(file.read_bytes().count(b"\n") for file in files)


def functions(trees: Iterable[ast.Module]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return every function and method of the modules."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters without self, cls and the context of Invoke."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "_ctx")])


def called_once(texts: Iterable[str], defined: Iterable[str]) -> int:
    """Return how many of the private names occur exactly twice: in their definition and in one call."""
    occurrences = Counter(word for text in texts for word in re.findall(r"\b_[a-z]\w*", text))
    return sum(occurrences[name] == 2 for name in set(defined) if re.match(r"_[a-z]", name))


def weigh(root: Path) -> dict[str, str]:
    """Return the figures of a tree by name."""
    listed = [path.relative_to(root) for path in root.rglob("*") if path.suffix in {*CODE, ".md"} and path.is_file()]
    hidden = [path for path in listed if any(part.startswith(".") for part in path.parts)]
    files = sorted(set(listed) - set(hidden))
    code = {name: [root / path for path in files if path.suffix in CODE and house(path) == name] for name in HOUSES}
    figures = {f"lines of the {name}": f"{lines(paths):,}" for name, paths in code.items()}
    pages = [path for path in files if path.suffix == ".md" and (path.parts[0] == "docs" or str(path) in PAGES)]
    figures["words of the documentation"] = f"{sum(len((root / page).read_text('utf-8').split()) for page in pages):,}"
    output = run([sys.executable, "-c", COMMANDS], cwd=root, env={"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"})
    figures["commands"] = output.stdout.strip()
    for name in ("product", "library", "lab"):
        texts = [path.read_text(encoding="utf-8") for path in code[name] if path.suffix == ".py"]
        defined = functions(map(ast.parse, texts))
        figures[f"modules of the {name}"] = str(len(texts))
        figures[f"private functions of the {name} called once"] = str(
            called_once(texts, [function.name for function in defined])
        )
        long = sum(parameters(function) > MOST_PARAMETERS for function in defined)
        figures[f"functions of the {name} with more than {MOST_PARAMETERS} parameters"] = str(long)
    return figures


def of_commit(commit: str) -> dict[str, str]:
    """Return the figures of a commit, or of the working tree for `.`. Raises ProcessError for an unknown commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree, archive = Path(folder) / "tree", Path(folder) / "tree.tar"
        if commit == ".":
            names = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT).stdout
            for name in filter(None, names.split("\0")):
                if (ROOT / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, tree / name)
        else:
            run(["git", "archive", "--output", archive, commit], cwd=ROOT)
            with tarfile.open(archive) as tar:
                tar.extractall(tree, filter="data")
        return weigh(tree)


def main(commits: list[str], seconds: list[str]) -> None:
    """Print the table; `seconds` are NAME=NUMBER,… of suites, a number for each column."""
    columns = {commit: of_commit(commit) for commit in commits}
    table = Table("", *columns)
    for name in next(iter(columns.values())):
        table.add_row(name, *(figures[name] for figures in columns.values()))
    for entry in seconds:
        name, _, values = entry.partition("=")
        table.add_row(f"seconds of {name}", *values.split(","))
    console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.weigh", description=__doc__)
    parser.add_argument("commits", nargs="*", default=["."], help="default: the working tree")
    parser.add_argument("--seconds", nargs="*", default=[], help="such as test=1500,690: a suite's times by column")
    options = parser.parse_args()
    sys.exit(exit_code(lambda: main(options.commits, options.seconds)))
