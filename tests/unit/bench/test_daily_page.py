"""The table of daily times: its numbers, and that the guide has the one of the saved figures."""

import json

import pytest

from sparkforge.bench import daily_page

MACHINE = {"processor": "A CPU", "cores": 2, "memory_bytes": 24 << 30, "system": "Linux x86_64", "commit": "abc",
           "measured_at": "2026-11-22T10:00:00+00:00"}  # fmt: skip


def test_the_table_has_median_range_and_load_of_each_figure(tmp_path):
    runs = [{"seconds": seconds, "load": load} for seconds, load in ((60.4, 0.2), (51.0, 1.1), (70.6, 0.9))]
    figures = tmp_path / "daily.json"
    figures.write_text(json.dumps({"machine": MACHINE, "seconds_to": {"docker run": runs, "rollback": runs[:1]}}))
    page = daily_page.replaced(f"before\n{daily_page.BEGIN}\nold\n{daily_page.END}\nafter\n", figures)
    assert "| `docker run` | 60 s | 51 … 71 s | 3 | 0.2 … 1.1 |" in page
    assert "| `rollback` | 60 s | 60 … 60 s | 1 | 0.2 … 0.2 |" in page
    assert "A CPU, 2 cores, 24 GiB, Linux x86_64; commit abc, 2026-11-22" in page
    assert "old" not in page
    assert page.startswith("before\n")
    assert "not measured" in daily_page.replaced(page, tmp_path / "absent.json")
    assert page.endswith("\nafter\n")
    with pytest.raises(ValueError, match="lacks the markers"):
        daily_page.replaced("none", figures)


def test_the_guide_has_the_table_of_the_saved_figures():
    text = daily_page.PAGE.read_text(encoding="utf-8")
    assert daily_page.replaced(text) == text, "python3 -m sparkforge.bench.daily_page"
