"""MkDocs builds the documentation with --strict, and the site loads nothing from another server."""

import re
import shutil

import pytest
from expected import refused

from lab import check
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def site():
    return check.build_site()


def test_site_loads_nothing_from_another_server(site):
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//"
    )
    assert not [page for page in site.rglob("*.html") if loads.search(page.read_text(encoding="utf-8"))]
    sheets = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")
    assert not [sheet for sheet in site.rglob("*.css") if sheets.search(sheet.read_text(encoding="utf-8"))]


def test_broken_links_fail_the_build_and_keep_the_old_site(site, empty_root):
    shutil.copytree(ROOT / "docs", empty_root / "docs")
    shutil.copy(ROOT / "mkdocs.yml", empty_root)
    with (empty_root / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.write("\n[a page](no-such-page.md) and [a heading](glossary.md#no-such-heading)\n")
    before = (site / "index.html").read_bytes()
    with refused("process.failed") as caught:
        check.build_site()
    assert all(link in caught.value.why for link in ("no-such-page.md", "no-such-heading"))
    assert (site / "index.html").read_bytes() == before
