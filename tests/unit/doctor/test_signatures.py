"""The table of known problems: each example shows its own, a healthy server shows none, a wrong table is refused."""

import re

import pytest

from sparkforge.cli import namespace
from sparkforge.compile import diagnosis
from sparkforge.core.errors import InputError
from sparkforge.doctor import signatures
from sparkforge.doctor.signatures import FactCondition

KNOWN = signatures.load()
BY_ID = {signature.id: signature for signature in KNOWN}


def test_commands_of_ours_that_a_fix_names_are_there():
    names = {*namespace.task_names, *namespace.collections}
    for signature in KNOWN:
        texts = signature.fix + (signature.before.fix if signature.before else "")
        for command in re.findall(r"\./inv ([a-z][\w.-]*)", texts):
            assert command in names, f"{signature.id}: ./inv {command}"


def test_what_the_compilers_say_is_the_builders_knowledge_too():
    """sparkforge/compile/diagnosis.py explains a failed build; serve must not import it, and the two must agree."""
    for pattern, name, text in (
        (diagnosis.NO_FP4, "fp4-without-suffix", "Feature 'cvt.e2m1x2.f32' not supported on .target 'sm_121'"),
        (
            diagnosis.SUFFIXED,
            "fp4-suffix-mismatch",
            "PTX with .target 'sm_121a' cannot be compiled for architecture 'sm_121'",
        ),
    ):
        assert pattern.search(text)
        assert BY_ID[name].line.search(text)


def test_a_condition_holds_only_for_a_known_fact_of_its_type():
    for condition, holds, fails in (
        ({"is": True}, True, 1),
        ({"is": False}, False, None),
        ({"at_least": 1}, 1, True),
        ({"below": 2}, 1.5, 2),
        ({"below": 2}, 1, "1"),
    ):
        assert [FactCondition.model_validate(condition).holds(value) for value in (holds, fails)] == [True, False]


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
        (('line = "x"', ""), "neither a condition for lines nor facts"),
        (('line = "x"', 'line = "x?"'), "`line` matches every line"),
        (('line = "x"', 'line = "("'), "signature.0.line: Input should be a valid regular expression"),
        (('what = "w"', 'what = "{gone}"'), "no group fills {gone}"),
        (("", 'follows = ["b"]'), "is no signature"),
        (("", 'facts = {"a" = {}}'), "neither a value nor a bound"),
        ((GOOD, GOOD + GOOD), "is there twice"),
        ((GOOD, "[[signature]"), "it is no TOML"),
    ],
)
def test_a_malformed_table_is_refused_by_name(tmp_path, change, message):
    old, new = change
    table = tmp_path / "signatures.toml"
    table.write_text(GOOD.replace(old, new) if old else f"{GOOD}{new}\n")
    with pytest.raises(InputError, match=re.escape(message), check=lambda error: error.code == "input.signatures"):
        signatures.load(table)
