"""The generated pages of docs/reference are those that the code generates."""

import pytest

from sparkforge.cli import reference_pages


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_page_is_current(name):
    page = (reference_pages.FOLDER / name).read_text(encoding="utf-8")
    assert page == reference_pages.PAGES[name](), "run: .venv/bin/python -m sparkforge.cli.reference_pages"
