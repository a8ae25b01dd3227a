"""The table of daily times: its numbers, and that the guide has the one of the saved figures."""

import json
import re

import pytest

from lab import daily_page
from sparkforge.core.paths import ROOT

MACHINE = {"processor": "A CPU", "cores": 2, "memory_bytes": 24 << 30, "system": "Linux x86_64", "commit": "abc",
           "measured_at": "2026-11-22T10:00:00+00:00"}  # fmt: skip


def test_the_table_has_median_range_and_load_of_each_figure(tmp_path):
    runs = [{"seconds": seconds, "load": load} for seconds, load in ((60.4, 0.2), (51.0, 1.1), (70.6, 0.9))]
    figures = tmp_path / "daily.json"
    figures.write_text(json.dumps({"machine": MACHINE, "seconds_to": dict.fromkeys(daily_page.NAMES, runs)}))
    page = daily_page.replaced(f"before\n{daily_page.BEGIN}\nold\n{daily_page.END}\nafter\n", figures)
    for name in daily_page.NAMES:
        assert f"| `{name}` | 60 s | 51 … 71 s | 3 | 0.2 … 1.1 |" in page
    assert "A CPU, 2 cores, 24 GiB, Linux x86_64; commit abc, 2026-11-22" in page
    assert "old" not in page
    assert page.startswith("before\n")
    assert "not measured" in daily_page.replaced(page, tmp_path / "absent.json")
    assert page.endswith("\nafter\n")
    with pytest.raises(ValueError, match="lacks the markers"):
        daily_page.replaced("none", figures)


@pytest.mark.parametrize("runs", [(3, 3, 2), (3, 3, 4), (3, 3, 0)])
def test_figures_that_are_not_whole_are_refused(runs):
    run = {"seconds": 60.4, "load": 0.2}
    times = {name: [run] * count for name, count in zip(daily_page.NAMES, runs, strict=True) if count}
    with pytest.raises(ValueError, match="needs 3 runs of each"):
        daily_page.table({"machine": MACHINE, "seconds_to": times})


def test_the_names_are_those_that_the_engine_tests_measure():
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests/engine").glob("test_*.py"))
    assert sorted(re.findall(r'figures\.measured\("(.+)"\)', tests)) == sorted(daily_page.NAMES)


def test_the_guide_has_the_table_of_the_saved_figures():
    text = daily_page.PAGE.read_text(encoding="utf-8")
    assert daily_page.replaced(text) == text, ".venv/bin/python -m lab.daily_page"
