import json
import multiprocessing

import pytest

from forge import manifest
from forge.manifest import Made
from sparkforge.errors import BusyError


def writer(text, calls):
    def make(temporary):
        calls.append(text)
        temporary.mkdir()
        (temporary / "a").write_text(text)
        (temporary / "b").write_text(text)
        return Made({"a": text}, {"tool": "1"}, {"fact": [1]})

    return make


def test_a_stage_runs_once_for_the_same_inputs_and_again_for_others(tmp_path):
    place, calls = tmp_path / "deep/place", []
    first, made = manifest.once(place, "s", {"in": "1"}, writer("one", calls))
    assert made
    again = manifest.once(place, "s", {"in": "1"}, writer("two", calls))
    assert again == (first, False)
    assert (first.outputs, first.tools["tool"], first.facts, first.seconds >= 0) == (
        {"a": "one"},
        "1",
        {"fact": [1]},
        True,
    )
    assert json.loads(manifest.beside(place).read_text())["stage"] == "s"
    manifest.once(place, "s", {"in": "2"}, writer("two", calls))
    manifest.once(place, "another stage", {"in": "2"}, writer("three", calls))
    assert calls == ["one", "two", "three"]
    assert (place / "a").read_text() == "three"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": 1}', '{"stage": 1, "what": 2}'])
def test_a_damaged_manifest_or_a_missing_artifact_is_made_again(tmp_path, damage):
    place, calls = tmp_path / "p", []
    manifest.once(place, "s", {}, writer("one", calls))
    manifest.beside(place).write_text(damage)
    assert manifest.load(place) is None
    manifest.once(place, "s", {}, writer("two", calls))
    manifest.remove(place)
    manifest.once(place, "s", {}, writer("three", calls))
    assert calls == ["one", "two", "three"]


def test_a_stage_that_fails_leaves_nothing(tmp_path):
    def fail(temporary):
        temporary.mkdir()
        (temporary / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manifest.once(tmp_path / "p", "s", {}, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".p.lock"]


def test_two_at_once_are_told_apart(tmp_path):
    context = multiprocessing.get_context("fork")
    inside, leave = context.Event(), context.Event()

    def slow(temporary):
        inside.set()
        assert leave.wait(60)
        temporary.write_text("x")
        return Made({})

    other = context.Process(target=manifest.once, args=(tmp_path / "p", "s", {}, slow))
    other.start()
    assert inside.wait(60)
    with pytest.raises(BusyError, match="make p"):
        manifest.once(tmp_path / "p", "s", {}, writer("x", []))
    leave.set()
    other.join(60)
    assert (tmp_path / "p").read_text() == "x"


def test_a_kill_at_any_step_leaves_the_whole_artifact_or_an_untrusted_one(tmp_path, kit):
    place = tmp_path / "p"
    manifest.once(place, "s", {"in": "1"}, writer("old", []))

    def action():
        manifest.once(place, "s", {"in": "2"}, writer("new", []))

    def check():
        trusted = manifest.load(place)
        if trusted is not None:
            text = {"1": "old", "2": "new"}[trusted.inputs["in"]]
            assert [(place / name).read_text() for name in ("a", "b")] == [text, text]
        action()
        assert manifest.current(place, "s", {"in": "2"})
        assert sorted(path.name for path in tmp_path.iterdir()) == [".p.lock", "p", "p.manifest.json"]
        manifest.once(place, "s", {"in": "1"}, writer("old", []))

    assert kit.kill_at_each_step(action, check) >= 8
