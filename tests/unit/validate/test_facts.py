"""Gathering never raises and always ends; sheets are read strictly."""

import json
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.core.errors import InputError
from sparkforge.core.process import ProbeError, ask, require
from validate.facts.fact import Fact, Reading, as_json, gather, load_sheet
from validate.facts.target import once


def test_what_goes_wrong_becomes_the_facts_error(target):
    def boom(_target):
        raise RuntimeError("two\n  lines")

    readings = (
        Reading("a", "src", lambda _: 1),
        Reading("b", "src", boom),
        Reading("c", "src", lambda _: None),
        Reading("d", "src", lambda _: {}["gone"]),
    )
    assert gather(target(), [readings]) == {
        "a": Fact(1, "src"),
        "b": Fact(None, "src", "two lines"),
        "c": Fact(None, "src"),
        "d": Fact(None, "src", "'gone'"),
    }


@pytest.mark.slow
def test_a_hang_ends_and_costs_only_its_group(target):
    stop = threading.Event()
    groups = [
        [
            Reading("before", "s", lambda _: 1),
            Reading("hangs", "s", lambda _: stop.wait(60)),
            Reading("after", "s", lambda _: 2),
        ],
        [Reading("other", "s", lambda _: 3)],
    ]
    facts = gather(target(), groups, deadline=2.0)
    stop.set()
    assert (facts["before"].value, facts["other"].value) == (1, 3)
    assert facts["hangs"] == Fact(None, "s", "no answer within 2 s")
    assert facts["after"].error == "no answer within 2 s"


def test_a_reading_that_needs_longer_has_its_own_limit(target):
    stop = threading.Event()
    groups = [
        [Reading("hangs", "s", lambda _: stop.wait(60), 0.2)],
        [Reading("slow", "s", lambda _: stop.wait(0.5) or 1, 30), Reading("next", "s", lambda _: 2, 0.1)],
    ]
    facts = gather(target(), groups)
    stop.set()
    assert facts["hangs"].error == "no answer within 0.2 s"
    assert (facts["slow"].value, facts["next"].value) == (1, 2)


def test_a_reading_that_exits_is_an_unknown_fact(target):
    def leave(_target):
        raise SystemExit(3)

    facts = gather(target(), [[Reading("leaves", "s", leave), Reading("next", "s", lambda _: 1)]], deadline=60)
    assert facts == {"leaves": Fact(None, "s", "3"), "next": Fact(1, "s")}


def test_sheet_comes_back_as_it_was_written(tmp_path):
    facts = {"a": Fact([1, "x"], "cmd"), "b": Fact(None, "cmd", "why"), "c": Fact(None, "cmd")}
    (tmp_path / "s.json").write_text(json.dumps({"schema": 1, "facts": as_json(facts)}))
    assert load_sheet(tmp_path / "s.json") == facts


MALFORMED = {
    "empty": "",
    "no json": "{",
    "a list": "[]",
    "no facts": '{"schema": 1}',
    "no schema": '{"facts": {}}',
    "facts a list": '{"schema": 1, "facts": []}',
    "other schema": '{"schema": 2, "facts": {}}',
    "bare value": '{"schema": 1, "facts": {"a": 1}}',
    "no value": '{"schema": 1, "facts": {"a": {"source": "x"}}}',
    "odd key": '{"schema": 1, "facts": {"a": {"value": 1, "valeu": 2}}}',
    "source a number": '{"schema": 1, "facts": {"a": {"value": 1, "source": 2}}}',
    "error a number": '{"schema": 1, "facts": {"a": {"value": 1, "error": 2}}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_sheet_is_one_named_error(tmp_path, case):
    (tmp_path / "s.json").write_text(MALFORMED[case])
    with pytest.raises(InputError, check=lambda error: error.code == "input.facts") as caught:
        load_sheet(tmp_path / "s.json")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 10


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_bytes(b"\xff\xfe")])
def test_unreadable_sheet_is_the_same_error(tmp_path, make):
    make(tmp_path / "s.json")
    with pytest.raises(InputError, check=lambda error: error.code == "input.facts"):
        load_sheet(tmp_path / "s.json")


@given(st.recursive(st.none() | st.integers() | st.text(), lambda i: st.lists(i) | st.dictionaries(st.text(), i)))
def test_any_json_is_a_sheet_or_a_facts_error(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps({"schema": 1, "facts": value}))
    with suppress(InputError):
        assert all(isinstance(fact, Fact) for fact in load_sheet(path).values())


def test_once_keeps_an_exception_too():
    calls = []

    @once
    def probe(key):
        calls.append(key)
        raise ProbeError("no")

    for _ in range(3):
        with pytest.raises(ProbeError):
            probe("x")
    assert calls == ["x"]


@pytest.mark.slow
def test_program_that_hangs_is_killed_with_its_children(ended):
    answer = ask(["sh", "-c", "sleep 600 & echo $!; sleep 600"], seconds=2.0)
    assert answer.code is None
    assert ended(int(answer.stdout))
    with pytest.raises(ProbeError, match=r"sh did not answer within 2 s"):
        require(answer, "sh", 2.0)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo broken >&2; exit 9", "probe ended with code 9: broken"),
        ("kill -SEGV $$", "probe was killed by signal 11: it printed nothing"),
    ],
)
def test_program_that_fails_says_how(script, why):
    with pytest.raises(ProbeError, match=why):
        require(ask(["sh", "-c", script], seconds=5), "probe", 5)


def test_program_that_is_not_there():
    with pytest.raises(ProbeError, match="cannot run no-such-program-here: No such file"):
        ask(["no-such-program-here"], seconds=1)
