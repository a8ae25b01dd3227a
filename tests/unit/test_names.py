"""The names of the project's own classes: a reader who meets one knows which it is."""

import ast
from collections import defaultdict

from sparkforge.core.paths import ROOT

PACKAGES = ("sparkforge", "validate", "spark_mxfp4/src")


def modules_of_classes(root):
    """Return public class name → the modules below `root` that define it, once for each definition."""
    modules = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules[node.name].append(str(file.relative_to(root)))
    return modules


def test_no_two_public_classes_share_a_name():
    modules = modules_of_classes(ROOT)
    assert len(modules) > 100
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}


# Words that say how a value came about, or nothing. `what` is a part of every error, so its constructor may have it.
SAY_NOTHING = {"told", "found", "made", "given", "one", "each", "what", "said", "wish", "thing", "mine"}
EXCEPT = {("sparkforge/core/errors.py", "what")}


def variables(tree):
    """Yield the names of a module's variables and parameters, those of comprehensions included.

    A field of a class is part of a file's format or of a public class, and is not among them.
    """
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node.id


def test_variables_say_what_they_hold():
    used = {
        (str(file.relative_to(ROOT)), name)
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for name in variables(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert len(used) > 5000
    assert {(file, name) for file, name in used if name in SAY_NOTHING} == EXCEPT
