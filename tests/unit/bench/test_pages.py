"""The written report and schema, tested without a browser."""

import json
import re
from html.parser import HTMLParser

import jsonschema
import pytest
from expected import refused

from sparkforge.bench import report, schema
from sparkforge.bench.baselines import FILE


def outline(text):
    """Return the tags of a page with the names of their attributes, and require that each closes."""
    tags, opened, parser = [], [], HTMLParser()
    parser.handle_starttag = lambda tag, attrs: (
        tags.append((tag, [name for name, _ in attrs])),
        opened.append(tag) if tag != "meta" else None,
    )
    parser.handle_endtag = opened.remove
    parser.feed(text)
    assert opened == []
    return tags


HOSTILE = {
    "markup": '</td></table><script>alert(1)</script><img src=x onerror="x">',
    "attributes": '" onmouseover="alert(1)\' autofocus',
    "rich markup": "[red][link=http://x]{code}{0}[/]",
    "terminal": "a\x1b]52;c;cm0=\x07\x1b[2J\x9b1m\x00b",
    "lines": "one\r\ntwo\n\nthree",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_on_a_page_becomes_markup_or_a_control_sequence(tmp_path, text):
    """All places of a page are tested at once: heading, column and cell of a table."""

    def page(text):
        table = report.make_table("title", (text, "b"), [(text, text)])
        report.write_page(tmp_path / "page.html", (text, table))
        return (tmp_path / "page.html").read_text()

    tags = outline(page(text))
    assert not {name for _, names in tags for name in names} & {"src", "href"}
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", page(text))
    assert set(map(str, tags)) == set(map(str, outline(page("plain"))))


# Schema


def test_results_fit_the_committed_schema(make_result):
    committed = (FILE.parent / "result.schema.json").read_text()
    jsonschema.validate(make_result().model_dump(mode="json"), json.loads(committed))


def test_a_file_that_is_no_result_is_refused_with_its_path(make_result, tmp_path):
    path = tmp_path / "r.json"
    for old, new, where in (
        ("sparkforge-bench/1", "sparkforge-bench/9", "format"), ('"passed": true', '"passed": "maybe"', "passed"),
        ('"conc": 4', '"conc": 0', r"config\.conc"), ('"duration_s"', '"duration"', "metrics"), ("{", "", "not JSON"),
    ):  # fmt: skip
        schema.write(path, make_result())
        path.write_text(path.read_text().replace(old, new, 1))
        with refused("input.result", rf"r\.json.*{where}"):
            schema.read(path)
    with refused("input.result", "cannot read"):
        schema.read(tmp_path / "none.json")


def test_no_page_or_result_keeps_a_urls_password(make_result, tmp_path):
    url = "http://anna:hunter2@spark.example:8000"
    report.write_page(tmp_path / "page.html", (f"{url} does not answer",))
    text = (tmp_path / "page.html").read_text()
    assert "spark.example:8000 does not answer" in text
    config = make_result().config.model_copy(update={"url": url})
    assert "hunter2" not in text
    assert "hunter2" not in config.model_dump_json()
    assert config.url == url  # requests still use the password


def test_a_benchmarks_tables_hold_nothing_that_a_terminal_obeys(make_result, capsys):
    told = "it\x1b]52;c;cm0=\x07\x1b[2J\x9b1m lied"
    failed = make_result(passed=False, metrics=None, checks=[{"name": "x", "ok": False, "told": told}])
    report.print_results([failed])
    out, err = capsys.readouterr()
    assert "it lied" in " ".join((out + err).split())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", out + err)
