"""The verdict on each patch of a queue, on archives and on trees."""

import re
from types import SimpleNamespace

import pytest
from expected import refused

from lab.patches import status, upstream
from lab.patches.status import Verdict
from sparkforge.core import paths
from sparkforge.core.errors import UsageError
from sparkforge.patching import series

A, O, U, C = Verdict.APPLIES, Verdict.OFFSET, Verdict.UPSTREAM, Verdict.CONFLICTS  # noqa: E741


def line(old, new):
    return lambda v1: {**v1, "pkg/a.py": v1["pkg/a.py"].replace(old, new)}


# change in the next release: (its files, verdicts, text in the evidence or the misfits of one patch)
CASES = {
    "nothing": (dict, (A, A, A), {}),
    "added lines above": (line("line 0", "x\ny\nz\nline 0"), (O, O, A), {0: "pkg/a.py +3 lines"}),
    "removed lines above": (line("line 0\nline 1\n", ""), (O, O, A), {1: "pkg/a.py -2 lines"}),
    "changed a line of context": (line("line 7", "line seven"), (C, C, A), {0: "pkg/a.py:3: the text that it changes"}),
    "took the first patch": (line("line 5", "LINE 5"), (U, A, A), {0: "its reverse applies"}),
    "made our file": (lambda v1: {**v1, "pkg/n.py": "other\n"}, (A, A, C), {2: "upstream has the file already"}),
    "took the third": (lambda v1: {**v1, "pkg/n.py": "new\n", "pkg/b.py": "value = 2\n"}, (A, A, U), {2: "reverse"}),
    "doubled the text": (
        lambda v1: {**v1, "pkg/a.py": "x\n" + v1["pkg/a.py"] * 2}, (C, C, A), {0: "fits in 2 places: lines 4, 16"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_patch_gets_its_verdict_and_evidence(world, case):
    change, verdicts, evidence = CASES[case]
    files = {path: text and text.encode() for path, text in change(world.V1).items()}
    judged = status.judge(world.queue(), files.get)
    assert tuple(patch.verdict for patch in judged) == verdicts
    for number, expected_text in evidence.items():
        assert expected_text in "\n".join([judged[number].evidence, *map(str, judged[number].misfits)])


@pytest.mark.parametrize("damaged", ["index.json", "[0-9a-f]*[0-9a-f]"])
def test_damaged_kept_bytes_are_read_again(world, damaged):
    release = upstream.release(world.table, world.component)
    assert release.pinned
    first = status.judge_release(world.queue(), release)
    files = list((paths.cache() / "members" / release.sha256).glob(damaged))
    assert files
    for file in files:
        file.write_text("damaged")
    assert status.judge_release(world.queue(), release) == first


def test_a_tree_is_judged_without_hash_checks(kit, world, tmp_path):
    tree = kit.write(tmp_path / "tree", world.V1)
    before = kit.snapshot(tree)
    assert [patch.verdict for patch in status.judge_tree(world.queue(), tree)] == [A, A, A]
    assert kit.snapshot(tree) == before
    (tree / "pkg/b.py").write_text("by hand\n")
    assert [patch.verdict for patch in status.judge_tree(world.queue(), tree)] == [A, A, Verdict.CONFLICTS]
    with pytest.raises(UsageError, match="it is no folder"):
        status.judge_tree(world.queue(), tree / "none")


def test_missing_releases_and_queues_are_named(world, monkeypatch):
    """The error names the newest versions, not the last by the alphabet."""
    with refused("input.pins", "there is no stack t"):
        series.queues(world.table, "t", world.patches)
    with refused("input.pins", "no patches for vllm"):
        status.chosen(world.table, "s", "0.33.0", world.patches)
    versions = ["0.9.2", "0.10.0", "0.31.0", "0.4.0", "0.33.0", "0.8.5", "0.7.3", "0.6.6", "0.5.5", "not-a-version"]
    packages = [
        SimpleNamespace(filename=f"up-{version}.tar.gz", version=version, package_type="sdist", digests={})
        for version in versions
    ]
    monkeypatch.setattr(upstream, "project_page", lambda package, http: SimpleNamespace(packages=packages))
    newest = "0.5.5, 0.6.6, 0.7.3, 0.8.5, 0.9.2, 0.10.0, 0.31.0, 0.33.0"
    with refused("network.fetch", "no source archive of up.*name one of its versions: " + re.escape(newest) + "$"):
        upstream.release(world.table, world.component, "9.9.9")


def test_the_command_prints_the_table_and_ends_with_its_own_code(world, use_pins, monkeypatch, capsys):
    use_pins(world.table)
    monkeypatch.setattr(status, "queues", lambda table, stack, patches=None: [(world.component, world.queue())])
    status.print_status("s")
    assert capsys.readouterr().out.splitlines() == [
        "up-1.0 on up-1.0.tar.gz", *(f"  ✓ 000{number}-change-something.patch: applies" for number in (1, 2, 3)),
    ]  # fmt: skip
    world.release("2.0", CASES["changed a line of context"][0](world.V1))
    with refused("patch.conflict") as caught:
        status.print_status("s", "up-2.0")
    assert caught.value.why == "0001-change-something.patch, 0002-change-something.patch"
    assert caught.value.fix == ".venv/bin/python -m lab.patches rebase up-2.0"
    printed = capsys.readouterr()
    assert "  ✗ 0001-change-something.patch: conflicts (1 of 1 hunks)" in printed.out
    assert "pkg/a.py:3: the text that it changes is not there\n    -line 5\n    +LINE 5" in printed.err
