"""Runs tests on the supported releases of vLLM that are not installed.

The release's own Python, from its sdist, runs with the environment's dependencies. `VLLM_TARGET_DEVICE=cpu` selects
vLLM's CPU platform without a CPU build (vllm/platforms/__init__.py). In the plugin's tests compiled extensions are
absent, so that any call of one fails. A server uses the extensions of the environment's release.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spark_mxfp4.vllm.versions import SUPPORTED
from sparkforge import pins
from sparkforge.core.paths import ROOT
from sparkforge.sources import trees

pytestmark = pytest.mark.integration

TABLE = pins.load()
INSTALLED = TABLE.component("embedded", "vllm").version
SDISTS = {
    component.version: component
    for stack in TABLE.stacks.values()
    for component in stack.components.values()
    if (component.package, component.kind) == ("vllm", "sdist") and component.version in SUPPORTED
}


def test_every_supported_release_is_pinned():
    assert SDISTS.keys() == set(SUPPORTED)
    assert INSTALLED in SUPPORTED


def require_passed(file, **settings):
    """Run a file's tests in another process; all must pass, and none may be skipped."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, **settings, "VLLM_TARGET_DEVICE": "cpu"}
    file = ROOT / "tests" / "integration" / file
    process = subprocess.run([*command, file], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.fullmatch(r"\d+ passed(, \d+ warnings)? in .*", process.stdout.splitlines()[-1]), process.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("release", [version for version in SUPPORTED if version != INSTALLED])
def test_the_plugins_tests_pass_on_its_real_python(release):
    component = SDISTS[release]
    [archive] = component.files
    trees.unpack_archive(component, archive)
    path = filter(None, [str(trees.tree_folder(component, archive)), os.environ.get("PYTHONPATH")])
    require_passed("test_vllm_plugin.py", PYTHONPATH=os.pathsep.join(path), SPARKFORGE_TEST_VLLM=release)


@pytest.mark.nightly
def test_the_forms_of_harmony_are_read_on_the_next_release(next_trees):
    for extension in Path(importlib.util.find_spec("vllm").origin).parent.glob("*.so"):
        shutil.copy2(extension, next_trees.patched / "vllm")
    require_passed("test_harmony_forms.py", SPARKFORGE_TEST_TREE=str(next_trees.patched))
