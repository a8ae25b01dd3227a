"""The page on upstream releases shows the report in releases.json."""

import json

from lab.upstream import report
from sparkforge.core.paths import ROOT

PAGE = ROOT / "lab/upstream/releases.md"


def test_the_page_has_the_table_of_the_kept_report_with_its_date_and_command():
    document = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert report.markdown(document) in page
    assert f"on {document['date']}" in page
    names = ",".join(release["name"].removeprefix("vllm-") for release in document["releases"])
    assert f".venv/bin/python -m lab.upstream check --against {names} --json\n" in page
