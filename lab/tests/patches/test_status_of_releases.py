"""Our queues on real upstream releases: the expected verdict on each patch."""

import tarfile

import pytest

from lab.patches import checkout, status, upstream
from lab.patches.status import Verdict
from sparkforge import pins
from sparkforge.core.git import git
from sparkforge.patching.hunks import read_files
from sparkforge.patching.series import PATCHES, Queue
from sparkforge.sources import fetch

pytestmark = pytest.mark.integration

A, O, U, C = Verdict.APPLIES, Verdict.OFFSET, Verdict.UPSTREAM, Verdict.CONFLICTS  # noqa: E741
TABLE = pins.load()
ORACLE = "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py"
# (stack, against): verdicts in the queue's order, and text in the evidence or misfits of one patch
EXPECTED = {
    ("spark", "0.32.0"): ((A,) * 27, {}),
    ("spark", "0.33.0"): (
        (A, C, O, A, C, C, O, C, A, O, O, C, C, C, C, O, C, C, C, C, C, C, C, A, C, O, C),
        {1: f"{ORACLE}:55: the text", 2: "vllm/compilation/decorators.py +9 lines"},
    ),
    ("spark", "flashinfer-0.7.0.post1"): ((A, A, A, A), {}),
    ("spark", "flashinfer-0.7.2.post1"): (
        (O, C, O, O),
        {
            0: "flashinfer/jit/cpp_ext.py +22 lines",
            1: "flashinfer/jit/fused_moe.py:14: the text",
            2: "flashinfer/attention/_core.py +56 lines",
            3: "flashinfer/jit/gemm/__init__.py +6 lines",
        },
    ),
    ("ngc-25.12", "0.13.0"): ((A, A, A, A), {}),
    ("ngc-25.12", "0.32.0"): (
        (O, U, U, C),
        {
            0: "vllm/platforms/interface.py +248 lines",
            1: "its Drop-when holds: lacks vllm/model_executor/layers/quantization/mxfp4.py",
            2: "its Drop-when holds: contains vllm/model_executor/model_loader/weight_utils.py",
            3: "vllm/compilation/decorators.py:493",
        },
    ),
}


def released(stack, against):
    component, queue, version = status.chosen(TABLE, stack, against)
    return queue, upstream.release(TABLE, component, version)


@pytest.mark.parametrize(("stack", "against"), EXPECTED)
def test_the_verdict_on_each_patch(stack, against):
    verdicts, texts = EXPECTED[stack, against]
    findings = status.judge_release(*released(stack, against))
    assert tuple(finding.verdict for finding in findings) == verdicts, "\n".join(map(str, findings))
    for number, text in texts.items():
        assert text in "\n".join([findings[number].evidence, *map(str, findings[number].misfits)])


@pytest.mark.parametrize("name", ["vllm", "flashinfer"])
def test_a_checkout_of_the_pinned_release_gets_the_queue_as_commits(name, tmp_path):
    component = TABLE.component("spark", name)
    release = upstream.release(TABLE, component)
    file = fetch.fetch(release.package, release.filename, release.sha256)
    queue = Queue.load(PATCHES / component.patches)
    tree = tmp_path / name
    with tarfile.open(file) as archive:  # as cloned, except for the submodules
        for member in archive:
            path = member.name.partition("/")[2]
            if member.isfile() and not path.startswith("3rdparty/"):
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(archive.extractfile(member).read())
    for command in (("init", "--quiet"), ("add", "--all", "--force"), ("commit", "--quiet", "-m", "release")):
        git(tree, *command, settings=["user.name=A", "user.email=a@b"])
    before = read_files(tree, queue.paths)
    assert f"{len(queue.patches)} commits on" in checkout.commit_to_checkout(TABLE, "spark", tree)
    assert read_files(tree, queue.paths) == queue.apply(before)
    assert "already there" in checkout.commit_to_checkout(TABLE, "spark", tree)
    assert git(tree, "status", "--porcelain").stdout == ""
