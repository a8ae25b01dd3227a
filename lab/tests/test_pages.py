"""The program that checks what the pages name."""

import pytest

from lab import pages
from sparkforge.core.paths import ROOT

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
def test_what_leads_nowhere_is_named(text, problem):
    assert [*pages.problems({PAGE: f"# Title\n\n{text}"})] == [f"docs/index.md: {problem}"]


def test_a_heading_a_command_and_a_file_that_are_there_are_no_problem():
    link = f"[a](glossary.md) [b](#{min(pages.anchors(PAGE))})"
    text = f"{link} `deploy/start`\n\n```sh\n./inv logs -f   # ./inv nope\n./inv --list\n```\n"
    assert [*pages.problems({PAGE: text})] == []


def test_a_page_that_code_names_must_exist():
    assert pages.broken(ROOT / "code", "docs/none.md") == "docs/none.md does not exist"
    assert not pages.broken(ROOT / "code", "docs/index.md")
