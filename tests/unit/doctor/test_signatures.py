"""The table of known problems: each example shows its own, a healthy server shows none, a wrong table is refused."""

import re
from datetime import date

import pytest

from sparkforge.cli import namespace
from sparkforge.compile import diagnosis
from sparkforge.core.errors import InputError
from sparkforge.core.paths import ROOT
from sparkforge.doctor import signatures
from sparkforge.doctor.signatures import FactCondition, Severity

KNOWN = signatures.load()
BY_ID = {signature.id: signature for signature in KNOWN}
SOURCE = re.compile(
    r"https://(?:github\.com/[\w.-]+/[\w.-]+(?:/(?:issues|pull)/\d+)?"
    r"|(?:docs\.(?:nvidia|docker|kernel|python|vllm)\.\w+|huggingface\.co/docs|pip\.pypa\.io|numpy\.org|man7\.org"
    r"|www\.freedesktop\.org)/\S*)"
)


def test_every_signature_has_a_next_command_and_a_source():
    for signature in KNOWN:
        assert signature.fix, signature.id
        assert signature.why, signature.id
        assert signature.seen, signature.id
        assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", signature.id)


def test_links_are_public_sources_or_pages_of_ours():
    for signature in KNOWN:
        for seen in signature.seen:
            page, _, anchor = seen.where.partition("#")
            if (ROOT / page).is_file():
                assert not anchor or f"## {anchor}" in (ROOT / page).read_text(encoding="utf-8"), seen.where
            else:
                assert SOURCE.fullmatch(seen.where), seen.where
            assert seen.date is None or date(2018, 1, 1) < seen.date <= date(2026, 11, 26)


def test_a_page_that_a_fix_names_is_there_and_says_so():
    for signature in KNOWN:
        for page, anchor in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", f"{signature.fix} {signature.why}"):
            text = (ROOT / page).read_text(encoding="utf-8")
            assert not anchor or f"## {anchor}" in text, signature.id


def test_commands_of_ours_that_a_fix_names_are_there():
    names = {*namespace.task_names, *namespace.collections}
    for signature in KNOWN:
        texts = signature.fix + (signature.before.fix if signature.before else "")
        for command in re.findall(r"\./inv ([a-z][\w.-]*)", texts):
            assert command in names, f"{signature.id}: ./inv {command}"


def test_what_the_compilers_say_is_the_builders_knowledge_too():
    """sparkforge/compile/diagnosis.py explains a failed build; serve must not import it, and the two must agree."""
    wordings = [
        (diagnosis.NO_FP4, "fp4-without-suffix", "Instruction 'cvt with .e2m1x2' not supported on .target 'sm_121'"),
        (diagnosis.NO_FP4, "fp4-without-suffix", "Feature 'cvt.e2m1x2.f32' not supported on .target 'sm_121'"),
        (
            diagnosis.SUFFIXED,
            "fp4-suffix-mismatch",
            "PTX with .target 'sm_121a' cannot be compiled for architecture 'sm_121'",
        ),
    ]
    for pattern, name, text in wordings:
        assert pattern.search(text)
        assert BY_ID[name].line.search(text)


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
kind = "CUDA"
severity = "fatal"
line = "x"
what = "w"
why = "y"
fix = "f"
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("", 'colour = "red"'), "signature.0.colour: Extra inputs are not permitted"),
        (
            ('severity = "fatal"', 'severity = "bad"'),
            "severity: Input should be 'fatal', 'slow' or 'harmless'",
        ),
        (('line = "x"', ""), "neither a condition for lines nor facts"),
        (('line = "x"', 'line = "x?"'), "`line` matches every line"),
        (('line = "x"', 'line = "("'), "signature.0.line: Input should be a valid regular expression"),
        (('kind = "CUDA"', 'kind = "else"'), "signature.0.kind: Input should be 'CUDA'"),
        (("", 'before = {vllm = "new", fix = "x"}'), "signature.0.before.vllm: String should match pattern"),
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


def test_severities_go_from_worst_to_least():
    assert sorted(Severity, key=lambda severity: severity.rank) == [Severity.FATAL, Severity.SLOW, Severity.HARMLESS]
