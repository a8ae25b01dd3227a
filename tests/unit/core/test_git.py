"""Git runs independently of a hook's repository and of the user's configuration."""

import os
import subprocess

import pytest
from expected import refused

from sparkforge.core import git as runner

pytestmark = pytest.mark.needs("git")
WHO = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def plain(folder, *arguments):
    command = ["git", *WHO, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The user's repository, named in the environment as in git's hooks."""
    folder = tmp_path / "mine"
    folder.mkdir()
    plain(folder, "init", "-q")
    (folder / "a").write_text("mine")
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
    home = tmp_path / "home"
    (home / ".config/git").mkdir(parents=True)
    (home / ".gitconfig").write_text('[filter "evil"]\n\tsmudge = sed s/good/evil/\n[core]\n\tautocrlf = true\n')
    (home / ".config/git/attributes").write_text("* filter=evil eol=crlf\n")
    (home / ".config/git/ignore").write_text("*.c\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name, value in {"COUNT": "1", "KEY_0": "core.autocrlf", "VALUE_0": "true"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "a.c").write_bytes(b"good\n")
    (folder / ".gitattributes").write_bytes(b"*.c filter=evil\n")
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
