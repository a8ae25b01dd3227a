"""The names of the project's own classes: a reader who meets one knows which it is."""

import ast
from collections import defaultdict

from sparkforge.core.paths import ROOT

PACKAGES = ("sparkforge", "validate", "spark_mxfp4")


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
