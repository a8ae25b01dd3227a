"""`./inv test` and `./inv check`: what they start, and what their failures say."""

import pytest
from invoke.context import Context
from invoke.exceptions import Exit

from sparkforge.cli import maintain, suite
from sparkforge.core.errors import ProcessError, UsageError


@pytest.mark.parametrize(
    "options",
    [{"minutes": "5"}, {"all_": True, "fast": True}, {"robustness": True, "fast": True}, {"minutes": "0"}],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(monkeypatch, options):
    monkeypatch.setattr(suite, "call", lambda *_args, **_more: pytest.fail("tests were started"))
    with pytest.raises(Exit) as ended:
        maintain.test.body(Context(), **options)
    assert ended.value.code == UsageError.exit_code


@pytest.mark.parametrize(
    ("machine", "installed", "failed"),
    [("aarch64", False, "one, three"), ("aarch64", True, "one, three, shell"),
     ("x86_64", False, "one, three, shell")],
)  # fmt: skip
def test_every_check_runs_and_those_that_failed_are_named(monkeypatch, tmp_path, capsys, machine, installed, failed):
    def program(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    program(suite.LINT.path / "bin" / "good", "echo good says $1")
    program(suite.LINT.path / "bin" / "bad", "echo bad says $1; exit 1")
    if installed:
        program(tmp_path / "shellcheck", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(suite.platform, "machine", lambda: machine)
    checks = {"one": ("bad", "x"), "two": ("good",), "three": ("missing",), "shell": ("shellcheck",)}
    monkeypatch.setattr(suite, "CHECKS", checks)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "reference_pages.py").write_text("import sys; sys.exit(f'{sys.argv[1:]} a page is old')")
    monkeypatch.setattr(suite.environments, "ensure", lambda *_: None)
    with pytest.raises(ProcessError, check=lambda error: error.code == "process.checks") as error:
        suite.check()
    assert error.value.why == f"{failed}, reference pages"
    output = capsys.readouterr()
    assert output.out.startswith("bad says x\n")
    assert output.out.endswith("['--check'] a page is old\n")
    assert ("NOT CHECKED: shellcheck" in " ".join(output.err.split())) == (failed == "one, three")
