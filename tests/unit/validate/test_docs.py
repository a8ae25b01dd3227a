"""The pages on validation agree with the code: checks, severities, JSON keys, replaced variables."""

import re

from sparkforge.core.paths import ROOT
from validate import rehearse
from validate.checks import CHECKS
from validate.checks.finding import DOC
from validate.checks.software import REPLACEMENTS
from validate.profiles import PROFILES
from validate.report import as_document

CHECKS_PAGE = (ROOT / DOC).read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "concepts" / "validation.md").read_text(encoding="utf-8")


def severity(profile, check):
    return "required" if check in profile.required else "advised" if check in profile.advised else "-"


def test_every_finding_links_to_a_section():
    sections = re.findall(r"^## (.+)$", CHECKS_PAGE, re.MULTILINE)
    assert sections == list(CHECKS)


def test_profile_table_has_the_severities():
    rows = re.findall(r"^\| \[(\S+)\]\(#(\S+)\) \| (\S+) \| (\S+) \|", CHECKS_PAGE, re.MULTILINE)
    spark, embedded = PROFILES["spark"], PROFILES["embedded"]
    assert rows == [(name, name, severity(spark, name), severity(embedded, name)) for name in CHECKS]


def test_json_keys_are_those_of_a_report(good):
    table = PAGE.split("## JSON report", 1)[1].split("\n## ", 1)[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert keys == list(as_document(rehearse("spark", good("spark"), "test")))


def test_replaced_variables_are_listed():
    section = CHECKS_PAGE.split("## unknown-environment", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^\| `(VLLM_\w+)` \|", section, re.MULTILINE) == list(REPLACEMENTS)


def test_hardware_ledger_says_how_each_claim_was_established():
    ledger = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    legend = set(re.findall(r"^\| \*(.+?)\* \|", ledger, re.MULTILINE))
    entries = re.findall(r"^- (.+)$", ledger.partition("## Not known")[0], re.MULTILINE)
    assert len(entries) > 100
    for entry in entries:
        assert set(re.findall(r".\. \*([\w-]+)\*: .", entry)) & legend, entry
    assert "Nothing in this ledger was verified on a real DGX Spark" in ledger
