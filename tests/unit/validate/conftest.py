"""Shared fixtures: recorded sheets of facts, and an empty site-packages with an interpreter that sees only it."""

import json
import os
import sys
from pathlib import Path

import pytest
from programs import write_program

from sparkforge.core.paths import ROOT
from validate.facts.fact import Fact, load_sheet
from validate.facts.target import Options, Target

SHEETS = Path(__file__).parent / "sheets"
GOOD = {
    "spark": SHEETS / "gb10-from-public-documents.json",
    "embedded": SHEETS / "embedded.json",
    "gpu": SHEETS / "gpu.json",
}


@pytest.fixture
def sheets() -> Path:
    return SHEETS


@pytest.fixture
def good():
    """Facts of the good sheet of a profile."""
    return lambda profile: load_sheet(GOOD[profile])


@pytest.fixture
def broken() -> dict[str, dict[str, object]]:
    """Check name → the values that break it."""
    return json.loads((SHEETS / "broken.json").read_text())["broken"]


@pytest.fixture
def with_values():
    """Return a function that returns given facts with some values replaced."""
    return lambda facts, values: {**facts, **{name: Fact(value, "test") for name, value in values.items()}}


@pytest.fixture
def target():
    """Return a function that makes a target for the embedded stack from options."""
    return lambda **options: Target(Options(**options), "embedded")


@pytest.fixture
def environment():
    """This test's environment without variables that affect vLLM, plus the checkout on the path."""
    steering = ("VLLM_", "HF_", "FLASHINFER_", "PYTHONOPTIMIZE", "CUDA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return lambda **more: {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An empty site-packages and `python` beside it: a real interpreter that has only that directory on its path."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    write_program(tmp_path / "python", f'PYTHONPATH={packages} exec {sys.executable} -S "$@"')
    return packages


@pytest.fixture
def install():
    """Return a function that writes a distribution: install(site, name, version, requires=, entry_points=)."""
    return _install


def _install(site: Path, name: str, version: str, *, requires: str = "", entry_points: str = "") -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *([f"Requires-Dist: {requires}"] if requires else [])]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", *lines]) + "\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
