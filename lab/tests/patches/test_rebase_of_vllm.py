"""A whole rebase of our queue for vLLM to a real later release."""

import re
import shutil

import pytest

from lab.patches import rebase, status, upstream
from lab.tests.patches.test_status_of_releases import ORACLE, TABLE, A, released
from sparkforge.core.errors import PatchError
from sparkforge.core.git import git
from sparkforge.patching.series import PATCHES, Queue

pytestmark = pytest.mark.integration


def test_a_rebase_to_0_33_0_needs_one_edit_and_ends_in_a_queue_that_applies(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "state"))
    patches = tmp_path / "patches"
    for folder in ("common", "vllm-0.32.0"):
        shutil.copytree(PATCHES / folder, patches / folder)
    series = patches / "vllm-0.32.0" / "series"
    lines = series.read_text().splitlines()
    for later in lines[4:]:  # those of the answers need edits of their own
        (series.parent / later).unlink(missing_ok=True)
    series.write_text("\n".join(lines[:4]) + "\n")
    released("spark", "0.33.0")
    job = rebase.prepare(TABLE, "spark", "0.33.0", frozenset(), patches)
    with pytest.raises(
        PatchError,
        match=r"0002-\S+ does not apply to vllm 0\.33\.0",
        check=lambda error: error.code == "patch.conflict",
    ):
        rebase.begin_rebase(job)
    assert ORACLE in capsys.readouterr().err
    assert {path.name for path in patches.iterdir()} == {"common", "vllm-0.32.0"}
    left = job.work / ORACLE
    text, count = re.subn(  # upstream added a function where we add ours: keep both
        r"(?ms)^<{7} [^\n]*\n(.*?)^\|{7} .*?^={7}\n(.*?)^>{7} [^\n]*\n", r"\1\2", left.read_text()
    )
    assert count == 1
    left.write_text(text)
    git(job.work, "add", ORACLE)
    carried = rebase.continue_rebase(job)
    assert [patch.action.partition(":")[0] for patch in carried] == ["applies as it is", "merged", "moved"]
    queue = Queue.load(patches / "vllm-0.33.0")
    _, release = released("spark", "0.33.0")
    assert [finding.verdict for finding in status.judge_release(queue, release)] == [A, A, A]
    read = upstream.reader(release, queue.paths)
    after = queue.apply({path: read(path) for path in queue.paths})
    for path, content in after.items():
        compile(content, path, "exec")
    assert after[ORACLE] == text.encode()
    assert queue.patches[0].entry == f"../common/{queue.patches[0].name}"
