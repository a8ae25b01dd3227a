"""The console prints no control sequences, whatever is printed and however it is split."""

import io
import json
import re
from contextlib import redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from sparkforge.core import console
from sparkforge.core.console import without_passwords
from sparkforge.core.errors import SparkforgeError

UNSAFE = re.compile(f"[{console.UNSAFE}]")
EVIL = [
    "\x1b]52;c;cm0gLXJmIH4=\x07", "\x9d52;c;cm0gLXJmIH4=\x9c",  # sets the clipboard
    "\x1b]8;;http://evil.example\x1b\\text\x1b]8;;\x1b\\", "\x1b[31mred\x1b[0m", "\x9b2J", "\x1b[?1049h",
    "\x1bP+q544e\x1b\\", "\x1b^pm\x1b\\", "\x1bc", "\x1b(0", "\x1b]52;c;", "a\bb\x7f\x00\x07\x0b\x0c",
    "\x85\x84\x90", "safe\u202eevil\u2066\u2069", "\ud800 \udfff", "all is well\rerror: it is not",
]  # fmt: skip


@pytest.fixture
def printed(monkeypatch):
    screen = io.StringIO()
    safe_console = console._SafeConsole(
        file=screen, force_terminal=True, color_system="standard", highlight=False, markup=False, emoji=False, width=200
    )
    monkeypatch.setattr(console, "console", lambda: safe_console)
    return screen.getvalue


def without_ours(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


PIECES = st.sampled_from([*EVIL, "text", "\n", "\r", "m", "\\", "é"]) | st.text(st.characters(), max_size=20)


@given(st.lists(PIECES, max_size=6).map("".join), st.data())
def test_control_characters_are_removed_and_splits_change_nothing(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    sanitiser = console.Sanitiser()
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cleaned = "".join(sanitiser.feed(piece) for piece in pieces)
    assert cleaned == console.safe(text) == console.safe(cleaned)
    assert not UNSAFE.search(cleaned)


def test_what_failed_is_one_line_of_a_bounded_length(printed):
    console.show_error(SparkforgeError("cannot read /a\nb" + "x" * 4000, "why", "fix", code="input.x"))
    what = without_ours(printed()).partition("\n  why:")[0].replace("\n", "")  # the screen is 200 columns wide
    assert what.startswith("✗ cannot read /a bxx")
    assert what.endswith("x… [input.x]")
    assert len(what) < 450


@pytest.mark.parametrize("evil", EVIL)
def test_every_way_of_printing_is_sanitised(printed, capsys, evil):
    console.say(f"say {evil}")
    console.show_error(SparkforgeError(f"what {evil}", f"why {evil}", f"fix {evil}"))
    table = Table("head " + evil, title=f"title {evil}")
    table.add_row(f"cell {evil}")
    console.console().print(table)
    with console.Steps(1).step(f"step {evil}") as tell:
        tell(f"detail {evil}")
    with console.download_bar(f"file {evil}", 10) as advance:
        advance(10)
    console.echo(f"echo {evil}")
    console.stream(f"stream {evil}")
    out, err = capsys.readouterr()
    for text in (out, without_ours(printed()), without_ours(err)):
        assert not UNSAFE.search(text)
    assert "]52;" not in printed()


def test_markup_and_links_in_a_text_are_not_interpreted(printed):
    table = Table("[red]head[/red]")
    table.add_row("[link=http://evil.example]cell[/link] :warning:")
    console.console().print(table)
    with console.Steps(1).step("[bold]x[/bold]") as tell:
        tell("[link=http://evil.example]y[/link]")
    assert "]8;" not in printed()
    assert "[link=http://evil.example]cell[/link] :warning:" in printed()


@given(st.recursive(st.text(max_size=20), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner)))
def test_json_keeps_every_value(value):
    with redirect_stdout(io.StringIO()) as out:
        console.echo_json(value)
    assert not UNSAFE.search(out.getvalue())
    assert json.loads(out.getvalue()) == value


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("at https://user:p@ss/w@host/simple/", "at https://***@host/simple/"),
        ("https://sesame@host", "https://***@host"),
        ("socks5h://u:p@host, redis://:p@host", "socks5h://***@host, redis://***@host"),
        ("https://host:8000/@scope/x@1.0", "https://host:8000/@scope/x@1.0"),
    ],
)
def test_a_urls_password_is_not_shown(printed, text, wanted):
    assert without_passwords(text) == wanted
    assert without_passwords(wanted) == wanted
    console.say(text)
    console.show_error(SparkforgeError(text, text, text))
    assert without_ours(printed()).count(wanted) == 4
