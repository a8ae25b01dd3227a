"""Writes the roofline tables of docs/performance.md: `python3 -m sparkforge.cli.roofline_page`."""

from __future__ import annotations

from sparkforge.core.files import write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.models import table as models
from sparkforge.plan import choose, page
from sparkforge.plan.architecture import parse
from sparkforge.serve import profiles

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- made by python3 -m sparkforge.cli.roofline_page -->", "<!-- end of what it made -->"
MODEL = "gpt-oss-120b"


def replaced(text: str) -> str:
    """Return the page with new tables between the markers. Raises ValueError if the markers are missing."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} lacks the markers {BEGIN} and {END}")
    tables = page.tables(parse(models.load()[MODEL].config, MODEL), choose.read_profiles(profiles.load()))
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


if __name__ == "__main__":
    write_atomic(PAGE, replaced(PAGE.read_text(encoding="utf-8")))
