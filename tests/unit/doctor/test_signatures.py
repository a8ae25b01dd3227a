"""The table of known problems: each example shows its own, a healthy server shows none, a wrong table is refused."""

import re

import pytest

from sparkforge.cli import namespace
from sparkforge.compile import ninja
from sparkforge.core.errors import InputError, ProcessError
from sparkforge.doctor import signatures
from sparkforge.doctor.signatures import FactCondition

KNOWN = signatures.load()
BY_ID = {signature.id: signature for signature in KNOWN}


def test_commands_of_ours_that_a_fix_names_are_there():
    names = {*namespace.task_names, *namespace.collections}
    for signature in KNOWN:
        for command in re.findall(r"\./inv ([a-z][\w.-]*)", signature.fix):
            assert command in names, f"{signature.id}: ./inv {command}"


def test_what_the_compilers_say_is_the_builders_knowledge_too():
    """sparkforge/compile/diagnosis.toml explains a failed build; serve must not read it, and the two must agree."""
    for name, text in (
        ("fp4-without-suffix", "Feature 'cvt.e2m1x2.f32' not supported on .target 'sm_121'"),
        ("fp4-suffix-mismatch", "PTX with .target 'sm_121a' cannot be compiled for architecture 'sm_121'"),
    ):
        error = ProcessError("nvcc ended with code 255", text, "run it by hand", code="process.failed")
        assert ninja.explained(error) is not error
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
        (('line = "x"', 'line = "("'), "signature.0.line: Input should be a valid regular expression"),
        ((GOOD, "[[signature]"), "it is no TOML"),
    ],
)
def test_a_malformed_table_is_refused_by_name(tmp_path, change, message):
    old, new = change
    table = tmp_path / "signatures.toml"
    table.write_text(GOOD.replace(old, new) if old else f"{GOOD}{new}\n")
    with pytest.raises(InputError, match=re.escape(message), check=lambda error: error.code == "input.table"):
        signatures.load(table)


def test_every_row_can_be_used():
    """It has a condition that not every line meets, texts whose groups are filled, and causes that are rows."""
    names = [signature.id for signature in signatures.load()]
    assert len(set(names)) == len(names)
    for signature in signatures.load():
        assert signature.reads_logs or signature.facts, signature.id
        assert not (signature.line and signature.line.search("")), signature.id
        bounds = [(fact.equal, fact.at_least, fact.below) for fact in signature.facts.values()]
        assert (None, None, None) not in bounds, signature.id
        groups = {*(signature.line.groupindex if signature.line else ()), *signatures.BUILTIN_GROUPS}
        groups |= {"why", "next"} if signature.block else set()
        assert {*re.findall(r"\{(\w*)\}", signature.what + signature.why + signature.fix)} <= groups, signature.id
        known = {*names, signatures.EVERY, signatures.AUDIT, signatures.ENGINE, signatures.LAST}
        assert {*signature.follows} <= known, signature.id
