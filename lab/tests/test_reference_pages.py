"""The program that writes and compares the generated pages of docs/reference."""

import shutil

import pytest

from lab import reference_pages
from sparkforge.core.errors import ProcessError


def test_the_pages_and_the_rows_of_variables_are_current():
    reference_pages.main(["--check"])


def test_a_page_that_differs_is_named_and_written(tmp_path, monkeypatch):
    shutil.copytree(reference_pages.FOLDER.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(reference_pages, "FOLDER", tmp_path / "reference")
    (tmp_path / "reference" / "errors.md").write_text("old")
    with pytest.raises(ProcessError, match=r"errors\.md is out of date"):
        reference_pages.main(["--check"])
    reference_pages.main([])
    reference_pages.main(["--check"])


def test_a_variable_without_a_row_is_named(tmp_path, monkeypatch):
    rows = reference_pages.VARIABLES.read_text(encoding="utf-8")
    (tmp_path / "variables.toml").write_text(rows.replace("SPARKFORGE_LIMITS", "SPARKFORGE_OTHER"))
    monkeypatch.setattr(reference_pages, "VARIABLES", tmp_path / "variables.toml")
    with pytest.raises(ProcessError, match="SPARKFORGE_LIMITS"):
        reference_pages.main(["--check"])
