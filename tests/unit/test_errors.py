import re

from sparkforge import error_page, errors
from sparkforge.paths import ROOT


def test_every_error_has_an_exit_code_of_its_own():
    codes = [c.exit_code for c in error_page.all_errors()]
    assert len(codes) == len(set(codes))
    assert all(0 < code < 126 for code in codes)  # 126 and up are the shell's


def test_message_has_three_parts():
    assert str(errors.FetchError("a failed", "because b", "./inv c")) == "a failed · because b · ./inv c"


def test_docs_hold_the_table_as_the_code_has_it():
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == error_page.page()


def test_every_error_lives_in_the_one_table():
    for room in ("forge", "serve", "validate"):
        for path in (ROOT / room).rglob("*.py"):
            assert not re.search(r"class \w+\(SparkforgeError\)", path.read_text(encoding="utf-8")), path
