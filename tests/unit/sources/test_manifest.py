import errno
import json

import pytest
from programs import write_files

from sparkforge.core import manifest
from sparkforge.core.manifest import Made


def writer(text, calls):
    def make(temporary):
        calls.append(text)
        write_files(temporary, {"a": text, "b": text})
        return Made({"a": text}, {"tool": "1"}, {"fact": [1]})

    return make


def test_a_stage_runs_once_for_the_same_inputs_and_again_for_others(tmp_path):
    artifact, calls = tmp_path / "deep/place", []
    first, is_new = manifest.once(artifact, "s", {"in": "1"}, writer("one", calls))
    assert is_new
    again = manifest.once(artifact, "s", {"in": "1"}, writer("two", calls))
    assert again == (first, False)
    assert (first.outputs, first.tools["tool"], first.facts, first.seconds >= 0) == (
        {"a": "one"}, "1", {"fact": [1]}, True,
    )  # fmt: skip
    assert json.loads(manifest.beside(artifact).read_text())["stage"] == "s"
    manifest.once(artifact, "s", {"in": "2"}, writer("two", calls))
    manifest.once(artifact, "another stage", {"in": "2"}, writer("three", calls))
    assert calls == ["one", "two", "three"]
    assert (artifact / "a").read_text() == "three"


def test_a_damaged_manifest_or_a_missing_artifact_is_made_again(tmp_path):
    artifact, calls = tmp_path / "p", []
    manifest.once(artifact, "s", {}, writer("first", calls))
    for damage in ("", "{", "[]", "[" * 200_000, '{"schema": 1}', '{"stage": 1, "what": 2}'):
        manifest.beside(artifact).write_text(damage)
        assert manifest.load(artifact) is None
        manifest.once(artifact, "s", {}, writer(damage, calls))
        assert calls.pop() == damage
    manifest.remove(artifact)
    manifest.once(artifact, "s", {}, writer("last", calls))
    assert calls == ["first", "last"]


def test_a_stage_that_fails_keeps_the_older_artifact_and_its_manifest(tmp_path):
    def fail(temporary):
        temporary.mkdir()
        assert (tmp_path / "p/a").read_text() == "old"
        raise OSError(errno.ENOSPC, "full")

    first, _ = manifest.once(tmp_path / "p", "s", {"in": "1"}, writer("old", []))
    with pytest.raises(OSError, match="full"):
        manifest.once(tmp_path / "p", "s", {"in": "2"}, fail)
    assert manifest.once(tmp_path / "p", "s", {"in": "1"}, writer("x", [])) == (first, False)
    assert (tmp_path / "p/b").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".p.lock", "p", "p.manifest.json"]


@pytest.mark.parametrize("name", ["p", "p[1]"])
def test_files_beside_an_artifact_that_only_look_like_ours_stay(tmp_path, name):
    foreign = [f".{name}.notes.tmp", f".{name}.1.2.tmp", f"{name}.tmp", f".{name}x.1.tmp", ".p1.1.tmp"]
    litter = [f".{name}.1.tmp", f".{name}.7.parts.tmp", f".{name}.manifest.json.abcd_123.tmp",
              f"..{name}.7.tmp.manifest.json.abcd_123.tmp"]  # fmt: skip
    for file in [*foreign, *litter]:
        (tmp_path / file).write_text("x")
    manifest.once(tmp_path / name, "s", {}, writer("new", []))
    assert {path.name for path in tmp_path.iterdir()} == {*foreign, f".{name}.lock", name, f"{name}.manifest.json"}


@pytest.mark.parametrize("removal", [1, 2])
def test_a_kill_during_cleanup_gives_no_artifact_the_manifest_of_another(tmp_path, monkeypatch, removal):
    """A run was killed before its swap; the older artifact has no manifest; the next run is killed during cleanup."""
    artifact, temporary = tmp_path / "p", tmp_path / ".p.1.tmp"
    writer("old", [])(artifact)
    manifest.once(temporary, "s", {"in": "2"}, writer("new", []))
    remove, removed = manifest.remove, []

    def killed(path):
        removed.append(path)
        if len(removed) == removal:
            raise KeyboardInterrupt
        remove(path)

    monkeypatch.setattr(manifest, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        manifest.once(artifact, "s", {"in": "3"}, writer("x", []))
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        manifest.once(artifact, "s", {"in": "3"}, lambda _: 1 / 0)
    assert manifest.load(artifact) is None
    assert (artifact / "a").read_text() == "old"
