"""The pages on validation agree with the code: checks, severities, JSON keys, replaced variables."""

import re

from sparkforge.core.paths import ROOT
from validate import rehearse
from validate.checks import CHECKS
from validate.checks.finding import DOC
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
