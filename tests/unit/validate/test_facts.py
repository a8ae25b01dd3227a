"""Gathering facts never raises and always ends; sheets are read strictly."""

import json
import threading

import pytest
from expected import refused

from sparkforge.core.process import ProbeError, ask, require
from validate.facts.fact import Fact, Reading, as_json, gather, load_sheet
from validate.facts.target import once


def test_a_reading_that_fails_has_its_reason_and_one_that_needs_longer_its_own_limit(target):
    def fail(error):
        raise error

    readings = [
        Reading("a", "src", lambda _: 1),
        Reading("b", "src", lambda _: fail(RuntimeError("two\n  lines"))),
        Reading("c", "src", lambda _: None),
        Reading("d", "src", lambda _: fail(SystemExit(3))),
    ]
    errors = {"a": None, "b": "two lines", "c": None, "d": "3"}
    assert gather(target(), [readings]) == {
        name: Fact(1 if name == "a" else None, "src", errors[name]) for name in "abcd"
    }
    stop = threading.Event()
    groups = [
        [Reading("hangs", "s", lambda _: stop.wait(60), 0.2)],
        [Reading("slow", "s", lambda _: stop.wait(0.5) or 1, 30), Reading("next", "s", lambda _: 2, 0.1)],
    ]
    facts = gather(target(), groups)
    stop.set()
    assert facts["hangs"].error == "no answer within 0.2 s"
    assert (facts["slow"].value, facts["next"].value) == (1, 2)


def test_a_sheet_is_read_as_it_was_written(tmp_path):
    facts = {"a": Fact([1, "x"], "cmd"), "b": Fact(None, "cmd", "why"), "c": Fact(None, "cmd")}
    (tmp_path / "s.json").write_text(json.dumps({"schema": 1, "facts": as_json(facts)}))
    assert load_sheet(tmp_path / "s.json") == facts


def test_a_probe_that_failed_does_not_run_again():
    calls = []

    @once
    def probe(key):
        calls.append(key)
        raise ProbeError("no")

    for _ in range(2):
        with pytest.raises(ProbeError):
            probe("x")
    assert calls == ["x"]


def test_malformed_sheet_is_one_named_error(tmp_path):
    for text in (None, b"\xff\xfe", b"{", b'{"schema": 1}', b'{"schema": 2, "facts": {}}', b"[" * 100_000,
                 b'{"schema": 1, "facts": {"a": {"source": "x"}}}',
                 b'{"schema": 1, "facts": {"a": {"value": 1, "source": 2}}}'):  # fmt: skip
        if text is not None:
            (tmp_path / "s.json").write_bytes(text)
        with refused("input.facts") as caught:
            load_sheet(tmp_path / "s.json")
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_program_that_hangs_is_killed_with_its_children(ended):
    answer = ask(["sh", "-c", "sleep 600 & echo $!; sleep 600"], seconds=2.0)
    assert answer.code is None
    assert ended(int(answer.stdout))
    with pytest.raises(ProbeError, match=r"sh did not answer within 2 s"):
        require(answer, "sh", 2.0)
