"""Our queues on real upstream releases: the expected verdict on each patch, and a whole rebase of one of them."""

import re
import shutil

import pytest

from forge import fetch, patch, pins, rebase, status, upstream
from forge.status import Verdict
from forge.upstream import Release
from sparkforge import paths
from sparkforge.errors import PatchConflictError

pytestmark = pytest.mark.integration

A, O, U, C = Verdict.APPLIES, Verdict.OFFSET, Verdict.UPSTREAM, Verdict.CONFLICTS  # noqa: E741
TABLE = pins.load()
ORACLE = "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py"
UNPINNED = {
    ("vllm", "0.33.0"): "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    ("flashinfer-python", "0.7.2.post1"): "af60319898dcfd552ba12a34165b9dd46c0bbd83d48ce665b1df6bd6ae77e9f1",
}
# (stack, against): verdicts in the queue's order, and what the evidence or misfits of one patch say
EXPECTED = {
    ("spark", "0.32.0"): ((A, A, A), {}),
    ("spark", "0.33.0"): (
        (A, C, O),
        {1: f"{ORACLE}:55: the text", 2: "vllm/compilation/decorators.py +9 lines"},
    ),
    ("spark", "flashinfer-0.7.0.post1"): ((A, A, A), {}),
    ("spark", "flashinfer-0.7.2.post1"): (
        (O, C, O),
        {
            0: "flashinfer/jit/cpp_ext.py +22 lines",
            1: "flashinfer/jit/fused_moe.py:14: the text",
            2: "flashinfer/attention/_core.py +56 lines",
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
    """The component's queue and the release, whose bytes are the ones that this table was made from."""
    component, queue, version = status.chosen(TABLE, stack, against)
    if sha256 := UNPINNED.get((component.package, version)):
        name = f"{component.package.replace('-', '_')}-{version}.tar.gz"
        fetch.fetch(component.package, name, sha256)
        return queue, Release(component.package, version, name, sha256, pinned=False)
    return queue, upstream.release(TABLE, component, version)


@pytest.mark.parametrize(("stack", "against"), EXPECTED)
def test_the_verdict_on_each_patch(stack, against):
    verdicts, told = EXPECTED[stack, against]
    found = status.of_release(*released(stack, against))
    assert tuple(one.verdict for one in found) == verdicts, "\n".join(map(str, found))
    for number, words in told.items():
        assert words in "\n".join([found[number].evidence, *map(str, found[number].misfits)])


def test_the_release_that_the_table_speaks_of_is_the_one_the_index_has():
    _, one = released("spark", "0.33.0")
    component = TABLE.component("spark", "vllm")
    assert upstream.release(TABLE, component, "0.33.0") == one
    assert not one.pinned


def test_a_rebase_to_0_33_0_needs_one_edit_and_ends_in_a_queue_that_applies(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "state"))
    patches = tmp_path / "patches"
    shutil.copytree(status.PATCHES / "vllm-0.32.0", patches / "vllm-0.32.0")
    released("spark", "0.33.0")
    with pytest.raises(PatchConflictError, match=r"0002-\S+ does not apply to vllm 0\.33\.0"):
        rebase.run(rebase.prepare(TABLE, "spark", "0.33.0", frozenset(), patches))
    assert f"{ORACLE}:" in capsys.readouterr().err
    assert [path.name for path in patches.iterdir()] == ["vllm-0.32.0"]
    (left,) = (paths.state() / "rebase").rglob("mxfp4.py")
    text, count = re.subn(  # upstream added a function where we add ours: keep both
        r"(?ms)^<{7} [^\n]*\n(.*?)^\|{7} .*?^={7}\n(.*?)^>{7} [^\n]*\n", r"\1\2", left.read_text()
    )
    assert count == 1
    left.write_text(text)
    job = rebase.prepare(TABLE, "spark", "0.33.0", frozenset(), patches)
    assert [one.told.partition(":")[0] for one in rebase.run(job)] == ["applies as it is", "merged by hand", "moved"]
    made = patch.Queue.load(patches / "vllm-0.33.0")
    _, one = released("spark", "0.33.0")
    assert [found.verdict for found in status.of_release(made, one)] == [A, A, A]
    read = upstream.reader(one, made.paths)
    after = patch.patched({path: read(path) for path in made.paths}, made)
    for path, content in after.items():
        compile(content, path, "exec")
    assert after[ORACLE] == text.encode()
    assert (patches / "vllm-0.33.0" / made.patches[0].name).read_bytes() == (
        patches / "vllm-0.32.0" / made.patches[0].name
    ).read_bytes()
