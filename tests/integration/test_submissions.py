"""Submissions to upstream: each one's own tests pass on the release with its patch and fail without it.

The tests are in `patches/QUEUE/upstream/` at their future upstream paths, and import nothing of ours. They run in a
separate process. FlashInfer is the real package from the pinned wheel; only `pynvml` is faked.
"""

import os
import re
import shutil
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import pytest

from lab.patches import status, upstream
from sparkforge import pins
from sparkforge.patching.series import PATCHES, Queue
from sparkforge.pins import Component
from sparkforge.sources import fetch

pytestmark = pytest.mark.integration

TABLE = pins.load()
STACK = "spark"
SUBMISSIONS = sorted(PATCHES.glob("*/upstream/*.md"))
# Not for upstream: torch 2.10.0 alphas exist only in NVIDIA's NGC images.
LEFT_OUT = {"0003-guard-assume-32bit-indexing-on-ngc-torch"}
PYTEST = Path(pytest.__file__).with_name("__main__.py")
WITHOUT_DRIVER = "import sys\nfrom unittest.mock import MagicMock\nsys.modules['pynvml'] = MagicMock()\n"


def named_tests(submission):
    return re.findall(r"^- `(tests/\S+\.py)`", submission.read_text(), re.MULTILINE)


@dataclass
class Package:
    """A folder with the package, its component and queue, and the folder's path for a path of the queue.

    Patches are applied one after another, so that one process runs all tests, because importing the package takes most
    of the time.
    """

    folder: Path
    scratch: Path
    process: object
    component: Component
    queue: Queue
    installed_path: Callable[[str], str] = str
    results: dict = field(default_factory=dict)  # how many patches are applied → submission → {test: passed?}

    def outcomes(self, submission):
        """Return {test: passed?} without the submission's patch, and with it.

        Both have the patches before it, like a pull request that builds on others.
        """
        number = [Path(patch.name).stem for patch in self.queue.patches].index(submission.stem)
        return self._with_patches(number)[submission], self._with_patches(number + 1)[submission]

    def _with_patches(self, count):
        if count not in self.results:
            read = upstream.reader(upstream.release(TABLE, self.component), self.queue.paths)
            queue = replace(self.queue, patches=self.queue.patches[:count])
            self.write(queue.apply({path: read(path) for path in self.queue.paths}))
            tested = [self._submission(patch) for patch in self.queue.patches[max(0, count - 1) : count + 1]]
            scratch = self.scratch / str(count)
            self.results[count] = outcomes(self.process, self.folder, [*filter(None, tested)], scratch)
        return self.results[count]

    def _submission(self, patch):
        path = PATCHES / self.component.patches / "upstream" / Path(patch.name).with_suffix(".md")
        return path if path in SUBMISSIONS else None

    def write(self, files):
        for path, content in files.items():
            file = self.folder / self.installed_path(path)
            file.unlink(missing_ok=True)
            for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
                compiled.unlink()  # else stale: the next text may have the same size and time
            if content is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)


# Other packages that the packages import, which take more than half of vLLM's import time.
OTHERS = ["torch._inductor", "transformers", "openai", "fastapi", "mcp", "compressed_tensors", "numba", "pytest"]


@pytest.fixture(scope="module")
def running(forks):
    """Return a context manager for a process, started with a PYTHONPATH, that runs tests in its forks."""

    def running(path=""):
        settings = {
            "PYTHONPATH": str(path), "VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1",
            "FLASHINFER_CUDA_ARCH_LIST": "12.1a", "PYTEST_ADDOPTS": "",
        }  # fmt: skip
        return forks(OTHERS, {**os.environ, **settings})

    return running


@pytest.fixture(scope="module")
def process(running):
    with running() as process:
        yield process


@pytest.fixture(scope="module")
def vllm(installed_vllm, process, tmp_path_factory):
    component, folder = TABLE.component(STACK, "vllm"), installed_vllm("submissions")
    queue = Queue.load(PATCHES / component.patches)
    return Package(folder, tmp_path_factory.mktemp("runs"), process, component, queue)


@pytest.fixture(scope="module")
def flashinfer(running, large_folder, tmp_path_factory):
    component = TABLE.component(STACK, "flashinfer")
    queue = Queue.load(PATCHES / component.patches)
    (name,) = [name for name in component.files if name.endswith(".whl")]
    wheel = fetch.fetch_pinned(component, name)

    def installed_path(path):
        top, _, rest = path.partition("/")
        return f"{queue.installed.get(top, top)}/{rest}"

    with large_folder("flashinfer") as folder:
        with zipfile.ZipFile(wheel) as archive:
            needed = [name for name in archive.namelist() if name.endswith(".py") or "/data/csrc/" in name]
            archive.extractall(folder, needed)
        (folder / "sitecustomize.py").write_text(WITHOUT_DRIVER)  # on the path before Python starts
        with running(folder) as process:
            yield Package(folder, tmp_path_factory.mktemp("runs"), process, component, queue, installed_path)


def outcomes(process, tree, submissions, scratch):
    """Run the tests of submissions on `tree` in a fork of `process`; return {submission: {test: passed?}}."""
    shutil.copytree(submissions[0].parent / "tests", scratch / "tests", dirs_exist_ok=True)  # may exist already
    report = scratch / "report.xml"
    options = f"-q -p no:cacheprovider -c {os.devnull} -o junit_family=xunit1".split()  # xunit1 names a test's file
    named = {submission: named_tests(submission) for submission in submissions}
    paths = (scratch / path for path in chain(*named.values()))
    arguments = (*options, f"--rootdir={scratch}", f"--junit-xml={report}", *paths)
    # Exit code 1: a test failed; above: pytest itself.
    process.run(PYTEST, arguments, codes=(0, 1), PYTHONPATH=str(tree), FLASHINFER_WORKSPACE_BASE=str(scratch))
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - pytest wrote it just now
    return {
        submission: {f"{c.get('file')}::{c.get('name')}": not len(c) for c in cases if c.get("file") in files}
        for submission, files in named.items()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("submission", SUBMISSIONS, ids=lambda path: path.stem)
def test_its_tests_fail_without_the_patch_and_pass_with_it(submission, request):
    package = request.getfixturevalue(status.target(submission.parent.parent.name)[0])
    without, patched = package.outcomes(submission)
    assert patched
    assert all(patched.values()), patched
    assert without.keys() == patched.keys()
    failing, total = list(without.values()).count(False), len(without)
    assert failing
    text = submission.read_text()
    assert f"{total} tests; without the patch {failing} of them fail" in text, (failing, total)


@pytest.mark.nightly
def test_the_patches_of_the_answers_do_the_same_in_the_next_release(next_trees, process, tmp_path):
    """vLLM 0.33.0 has no CPU build, so its own Python, without a server, must pass the tests of 0004 and later."""
    submissions = [path for path in SUBMISSIONS if "vllm" in path.parent.parent.name and path.stem >= "0004"]
    results = {}
    for kind, tree in vars(next_trees).items():
        (tmp_path / kind).mkdir()
        missing = tree / "orjson.py"  # 0.33.0 imports it to write HTTP answers; the tests send none
        missing.touch()
        try:
            results[kind] = outcomes(process, tree, submissions, tmp_path / kind)
        finally:
            missing.unlink()  # other tests use the tree
    assert len(results["patched"]) == len(submissions)
    assert all(tests and all(tests.values()) for tests in results["patched"].values()), results["patched"]
    assert not any(all(tests.values()) for tests in results["upstream"].values())  # without its patch, each fails


def test_every_patch_that_upstream_should_have_has_a_submission():
    for name in ("vllm", "flashinfer"):
        folder = PATCHES / TABLE.component(STACK, name).patches
        patches = {patch.name.removesuffix(".patch") for patch in Queue.load(folder).patches}
        assert {path.stem for path in (folder / "upstream").glob("*.md")} == patches - LEFT_OUT
