"""What upstream is to get: each submission's own tests, on the release with its patch (green) and without it (red).

The tests stand under `patches/QUEUE/upstream/` at the paths that they will have upstream, and import nothing of ours.
They run in a process of their own. FlashInfer is its real package from the pinned wheel: only `pynvml` is made up.
"""

import importlib.util
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge import pins
from sparkforge.core.process import run
from sparkforge.patching import status, upstream
from sparkforge.patching.series import Queue
from sparkforge.pins import Component
from sparkforge.sources import fetch

pytestmark = pytest.mark.integration

TABLE = pins.load()
STACK = "spark"
SUBMISSIONS = sorted(status.PATCHES.glob("*/upstream/*.md"))
# Not for upstream: torch 2.10.0 alphas exist in NVIDIA's NGC images alone.
LEFT_OUT = {"0003-guard-assume-32bit-indexing-on-ngc-torch"}
HEADINGS = ["Why", "What changes", "Evidence", "How it was tested", "What it does not do", "Related work"]
WITHOUT_DRIVER = "import sys\nfrom unittest.mock import MagicMock\nsys.modules['pynvml'] = MagicMock()\n"


def named_tests(submission):
    """The paths that a submission names, as upstream will have them."""
    return re.findall(r"^- `(tests/\S+\.py)`", submission.read_text(), re.MULTILINE)


def replaced(tree, files):
    """Write `files` (path → bytes, None: no such file) into a tree of hard links."""
    for path, content in files.items():
        (tree / path).unlink(missing_ok=True)
        if content is not None:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(content)


@dataclass
class Package:
    """A folder with the package, its component and queue, and where a path of the queue lies in the folder."""

    folder: Path
    component: Component
    queue: Queue
    place: Callable[[str], str] = str

    def trees(self, name, scratch):
        """Copies of the release without one patch of the queue, and with it.

        Both have the patches before it, as a pull request that builds on others.
        """
        read = upstream.reader(upstream.release(TABLE, self.component), self.queue.paths)
        files = {path: read(path) for path in self.queue.paths}
        states = {}
        for patch in self.queue.patches:
            states["without"] = files
            files = files | {change.path: change.apply(files[change.path]) for change in patch.changes}
            if patch.name == f"{name}.patch":
                states["with"] = files
                break
        for kind, files in states.items():
            shutil.copytree(self.folder, scratch / kind, copy_function=os.link)
            replaced(scratch / kind, {self.place(path): content for path, content in files.items()})
            yield kind, scratch / kind


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    installed = Path(importlib.util.find_spec("vllm").origin).parent
    component = TABLE.component(STACK, "vllm")
    folder = tmp_path_factory.mktemp("vllm")
    shutil.copytree(installed, folder / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    return Package(folder, component, Queue.load(status.PATCHES / component.patches))


@pytest.fixture(scope="module")
def flashinfer(tmp_path_factory):
    component = TABLE.component(STACK, "flashinfer")
    queue = Queue.load(status.PATCHES / component.patches)
    folder = tmp_path_factory.mktemp("flashinfer")
    (name,) = [name for name in component.files if name.endswith(".whl")]
    wheel = fetch.fetch_pinned(component, name)
    with zipfile.ZipFile(wheel) as archive:
        needed = [name for name in archive.namelist() if name.endswith(".py") or "/data/csrc/" in name]
        archive.extractall(folder, needed)
    (folder / "sitecustomize.py").write_text(WITHOUT_DRIVER)

    def place(path):
        top, _, rest = path.partition("/")
        return f"{queue.installed.get(top, top)}/{rest}"

    return Package(folder, component, queue, place)


def outcomes(tree, submission, scratch):
    """Run the submission's tests on the package in `tree`; return {test: passed?}."""
    shutil.copytree(submission.parent / "tests", scratch / "tests")
    report = scratch / "report.xml"
    environment = {
        "PYTHONPATH": str(tree), "VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1",
        "FLASHINFER_WORKSPACE_BASE": str(scratch), "FLASHINFER_CUDA_ARCH_LIST": "12.1a", "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={scratch}", f"--junit-xml={report}")
    done = run([sys.executable, "-m", "pytest", *options, *named_tests(submission)], cwd=scratch, env=environment,
               check=False)  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: a test failed; above: pytest itself
    cases = ET.parse(report).iter("testcase")  # noqa: S314 - pytest wrote it just now
    return {f"{case.get('classname')}::{case.get('name')}": not len(case) for case in cases}


@pytest.mark.parametrize("submission", SUBMISSIONS, ids=lambda path: path.stem)
def test_its_tests_fail_without_the_patch_and_pass_with_it(submission, request, tmp_path):
    package = request.getfixturevalue(status.target(submission.parent.parent.name)[0])
    results = {}
    for kind, tree in package.trees(submission.stem, tmp_path):
        (tmp_path / f"{kind} run").mkdir()
        results[kind] = outcomes(tree, submission, tmp_path / f"{kind} run")
    assert results["with"]
    assert all(results["with"].values()), results["with"]
    assert results["without"].keys() == results["with"].keys()
    failing, total = list(results["without"].values()).count(False), len(results["without"])
    assert failing
    text = submission.read_text()
    assert f"{total} tests; without the patch {failing} of them fail" in text, (failing, total)


def test_every_patch_that_upstream_should_have_has_a_submission():
    for name in ("vllm", "flashinfer"):
        folder = status.PATCHES / TABLE.component(STACK, name).patches
        patches = {patch.name.removesuffix(".patch") for patch in Queue.load(folder).patches}
        assert {path.stem for path in (folder / "upstream").glob("*.md")} == patches - LEFT_OUT


@pytest.mark.parametrize("submission", SUBMISSIONS, ids=lambda path: path.stem)
def test_it_says_everything_that_a_reviewer_asks(submission):
    text = submission.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    assert named_tests(submission)
    assert all((submission.parent / path).is_file() for path in named_tests(submission))
    assert re.search(r"https://github\.com/\S+/(pull|issues)/\d+", text)


@pytest.mark.parametrize("folder", sorted({path.parent for path in SUBMISSIONS}), ids=lambda path: path.parent.name)
def test_no_test_is_left_over(folder):
    named = {path for submission in folder.glob("*.md") for path in named_tests(submission)}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.py")} == named
