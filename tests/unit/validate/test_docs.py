"""docs/validation.md says what the code does: checks, profiles, fixes, exit codes, JSON keys, replaced variables."""

import re

import pytest

from sparkforge import errors
from sparkforge.paths import ROOT
from validate import rehearse
from validate.checks import CHECKS
from validate.checks_software import REPLACEMENTS
from validate.profiles import PROFILES
from validate.report import as_document

PAGE = (ROOT / "docs" / "validation.md").read_text()


def test_every_check_has_its_section_in_the_tables_order():
    assert re.findall(r"^### (.+)$", PAGE, re.MULTILINE) == list(CHECKS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_section_tells_meaning_and_fix(check):
    section = PAGE.split(f"### {check.name}\n", 1)[1].split("\n### ", 1)[0]
    assert section.startswith(f"\n{check.meaning}\n")
    assert f"Fix: `{check.fix}`" in section
    assert len(section.split()) > len(check.meaning.split()) + len(check.fix.split()) + 5  # it says more than the table


def severity(profile, check):
    return "required" if check in profile.required else "advised" if check in profile.advised else "-"


def test_profile_table_is_the_profiles():
    rows = [
        f"| [{name}](#{name}) | {severity(PROFILES['spark'], name)} | {severity(PROFILES['embedded'], name)} "
        f"| {check.meaning} |"
        for name, check in CHECKS.items()
    ]
    assert re.findall(r"^\| \[.*$", PAGE, re.MULTILINE) == rows


def test_exit_codes_are_those_of_the_errors():
    told = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert {name: int(code) for code, name in told} == {
        kind.__name__: kind.exit_code
        for kind in (
            errors.UsageError,
            errors.ValidationFailedError,
            errors.FactsError,
            errors.ValidationIncompleteError,
        )
    }


def test_json_keys_are_those_of_a_report(good):
    table = PAGE.split("## JSON report", 1)[1].split("\n## ", 1)[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert keys == list(as_document(rehearse("spark", good("spark"), "test")))


def test_replaced_variables_are_listed():
    section = PAGE.split("### unknown-environment", 1)[1].split("\n### ", 1)[0]
    assert re.findall(r"^\| `(VLLM_\w+)` \|", section, re.MULTILINE) == list(REPLACEMENTS)


def test_hardware_ledger_claims_nothing_from_a_real_spark():
    ledger = (ROOT / "docs" / "hardware.md").read_text()
    legend = set(re.findall(r"^\| \*(.+?)\* \|", ledger, re.MULTILINE))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ledger.splitlines() if line.count("|") == 5]
    claims = [row for row in rows if row[0] not in ("claim", "---")]
    assert len(claims) > 20
    for claim, how, source, date in claims:
        assert how in legend, claim
        assert source, claim
        assert re.fullmatch(r"2026-\d\d(-\d\d)?", date), claim
    assert "Nothing in this ledger was verified on a real DGX Spark" in ledger
