"""The generated pages of docs/reference are those that the code generates."""

import re

import pytest

from sparkforge.cli import reference_pages
from sparkforge.core import tables
from sparkforge.core.paths import ROOT

# Set by Sparkforge for its own processes or by its tests.
INTERNAL = {
    *("SPARKFORGE_CLUSTER_TOKEN", "SPARKFORGE_CLUSTER_WATCH", "SPARKFORGE_MAX_DEVICE", "SPARKFORGE_OFFLINE"),
    *("SPARKFORGE_OWN_SHM", "SPARKFORGE_SERVER", "SPARKFORGE_TEST_FAST"),
}


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_page_is_current(name):
    page = (reference_pages.FOLDER / name).read_text(encoding="utf-8")
    assert page == reference_pages.PAGES[name](), "run: .venv/bin/python -m sparkforge.cli.reference_pages"


def variables_of_code():
    """Return Sparkforge's variables that the code names, and every variable that a Compose file takes from outside."""
    code = [path for folder in ("sparkforge", "validate") for path in (ROOT / folder).rglob("*.py")]
    compose = [*ROOT.glob("docker-compose*.yml"), ROOT / "deploy" / "stacks.yml"]
    names = {name for path in code for name in re.findall(r"\"(SPARKFORGE_[A-Z_]*[A-Z])\"", path.read_text("utf-8"))}
    return names.union(*(re.findall(r"\$\{([A-Z_]+)", path.read_text("utf-8")) for path in compose))


def test_every_variable_has_a_row():
    table = tables.load(reference_pages.VARIABLES, reference_pages.Variables)
    documented = {name for _, rows in table for names in rows for name in names.split()}
    names = variables_of_code()
    assert len(names) > 60
    assert names - INTERNAL - documented == set()
