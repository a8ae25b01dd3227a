"""The checks of the documentation, and the generated pages."""

import json
import re
import shutil

import pytest

from lab import daily_page, pages, reference_pages, roofline_page
from lab.upstream import report
from sparkforge.core.errors import ProcessError
from sparkforge.core.paths import ROOT
from sparkforge.models import recipes as models
from sparkforge.plan import devices, roofline, speed
from sparkforge.plan.architecture import DenseFormat, parse
from sparkforge.plan.budget import Workload

PAGE = ROOT / "docs" / "index.md"


def test_every_page_of_this_checkout_is_consistent():
    assert pages.main() == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](none.md)", "none.md does not exist"), ("[a](glossary.md#none)", "glossary.md#none has no such heading"),
        ("[a](../README.md)", "../README.md leaves docs/"), ("`bench/none`", "bench/none does not exist"),
        ("```sh\ncd x && ./inv nope a\n```\n", "./inv nope a: there is no nope"),
        ("```sh\n./inv up \\\n  --nope 1 -- --of-vllm\n```\n", "./inv up --nope 1 -- --of-vllm: there is no --nope"),
    ],
)  # fmt: skip
def test_broken_links_and_commands_are_named(text, problem):
    assert [*pages.problems({PAGE: f"# Title\n\n{text}"})] == [f"docs/index.md: {problem}"]


def test_existing_headings_commands_and_files_are_no_problem():
    assert pages.broken(ROOT / "code", "docs/none.md") == "docs/none.md does not exist"
    assert not pages.broken(ROOT / "code", "docs/index.md")
    link = f"[a](glossary.md) [b](#{min(pages.anchors(PAGE))})"
    text = f"{link} `deploy/start`\n\n```sh\n./inv logs -f   # ./inv nope\n./inv --list\n```\n"
    assert [*pages.problems({PAGE: text})] == []


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
def test_incomplete_figures_are_refused(runs):
    run = {"seconds": 60.4, "load": 0.2}
    times = {name: [run] * count for name, count in zip(daily_page.NAMES, runs, strict=True) if count}
    with pytest.raises(ValueError, match="needs 3 runs of each"):
        daily_page.table({"machine": MACHINE, "seconds_to": times})


def test_the_engine_tests_measure_these_names_and_the_guide_has_the_saved_figures():
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests/engine").glob("test_*.py"))
    assert sorted(re.findall(r'figures\.measured\("(.+)"\)', tests)) == sorted(daily_page.NAMES)
    text = daily_page.PAGE.read_text(encoding="utf-8")
    assert daily_page.replaced(text) == text, ".venv/bin/python -m lab.daily_page"


def test_tables_and_figures_of_the_roofline_page_are_those_that_the_code_computes():
    page = roofline_page.PAGE.read_text()
    assert roofline_page.replaced(page) == page, "python -m lab.roofline_page"
    assert page.count(roofline_page.BEGIN) == 1
    model, spark = parse(models.load()["gpt-oss-120b"].config, "t"), devices.named("spark")
    text = " ".join(page.split())
    alone = roofline.decode(model, 1, Workload(roofline_page.CONTEXT))
    wide = sum(part.bytes for part in model.parts() if part.name in {"attention qkv", "attention o", "lm_head"})
    assert f"at most {spark.bytes_a_second / alone.bytes:.0f} tokens/s" in text
    assert f"{wide / alone.bytes:.0%}".replace("%", " % of the bytes of a token") in text
    others = [
        speed.ceiling(model, spark, 1, Workload(roofline_page.CONTEXT, kv=kv, dense=DenseFormat(form, form)))
        for form, kv in (("q8_0", "bf16"), ("mxfp4", "fp8"))
    ]
    assert f"the bound is {others[0]:.0f} to {others[1]:.0f}" in text


def test_the_pages_are_current_and_one_that_differs_is_named_and_written(tmp_path, monkeypatch):
    reference_pages.main(["--check"])
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


def test_the_page_of_upstream_releases_has_the_saved_report_its_date_and_command():
    page = (ROOT / "lab/upstream/releases.md").read_text(encoding="utf-8")
    document = json.loads((ROOT / "lab/upstream/releases.json").read_text(encoding="utf-8"))
    assert report.markdown(document) in page
    assert f"on {document['date']}" in page
    names = ",".join(release["name"].removeprefix("vllm-") for release in document["releases"])
    assert f".venv/bin/python -m lab.upstream check --against {names} --json\n" in page
