"""Git runs independently of a hook's repository and of the user's configuration."""

import os
import subprocess

import pytest
from expected import refused
from programs import write_files

from sparkforge.core import git as runner

pytestmark = pytest.mark.needs("git")
WHO = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def plain(folder, *arguments):
    command = ["git", *WHO, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The user's repository, named in the environment as in git's hooks."""
    folder = write_files(tmp_path / "mine", {"a": "mine"})
    plain(folder, "init", "-q")
    plain(folder, "add", "a")
    plain(folder, "commit", "-q", "-m", "mine")
    for name, value in {"DIR": ".git", "INDEX_FILE": ".git/index", "WORK_TREE": ""}.items():
        monkeypatch.setenv(f"GIT_{name}", str(folder / value))
    return folder


def test_a_hooks_environment_does_not_lead_git_into_the_users_repository(tmp_path, mine, monkeypatch):
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "b").write_text("scratch")
    for arguments in (("init", "-q"), ("add", "--all"), (*WHO, "commit", "-q", "-m", "scratch")):
        runner.git(scratch, *arguments)
    assert runner.git(scratch, "ls-files").stdout == "b\n"
    assert {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()} == before
    with refused("process.failed", "not a git repository"):
        runner.git(tmp_path, "log")


def test_a_tag_does_not_replace_the_commit(mine):
    plain(mine, "tag", "-a", "-m", "0.1.0", "0.1.0")
    assert runner.checkout_commit(mine) == plain(mine, "rev-parse", "--short=12", "HEAD").strip()


def test_no_configuration_attribute_or_ignore_file_of_the_user_counts(tmp_path, monkeypatch):
    evil = '[filter "evil"]\n\tsmudge = sed s/good/evil/\n[core]\n\tautocrlf = true\n'
    files = {".gitconfig": evil, ".config/git/attributes": "* filter=evil eol=crlf\n", ".config/git/ignore": "*.c\n"}
    monkeypatch.setenv("HOME", str(write_files(tmp_path / "home", files)))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name, value in {"COUNT": "1", "KEY_0": "core.autocrlf", "VALUE_0": "true"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    folder = write_files(tmp_path / "r", {"a.c": "good\n", ".gitattributes": "*.c filter=evil\n"})
    for arguments in (("init", "-q"), ("add", "--all"), (*WHO, "commit", "-q", "-m", "a"), ("rm", "-q", "-r", ".")):
        runner.git(folder, *arguments)
    runner.git(folder, "reset", "-q", "--hard")
    assert (folder / "a.c").read_bytes() == b"good\n"


def test_only_the_certificates_are_inherited(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_SSL_CAINFO", "/ca.pem")
    monkeypatch.setenv("GIT_SSH_COMMAND", "evil")
    variables = {**os.environ, **runner.environment(tmp_path)}
    assert variables["GIT_SSL_CAINFO"] == "/ca.pem"
    assert variables["GIT_SSH_COMMAND"] is None, "it is removed"
    assert variables["PATH"] == os.environ["PATH"]
