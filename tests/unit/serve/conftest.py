"""A fake engine that the SDK finds, and a `docker` command that writes down its arguments."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

# With --import-mode=importlib a test's neighbours are no package to import from.
_spec = importlib.util.spec_from_file_location("docker_api", Path(__file__).with_name("docker_api.py"))
docker_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docker_api)

COMMAND = """#!/bin/sh
# Stands for the docker command: writes down its arguments and says what the test put into its folder.
here=$(dirname "$0")
printf '%s\\n' "$*" >> "$here/calls"
for rule in "$here"/rules/*; do
    [ -e "$rule/pattern" ] || continue
    case "$*" in *"$(cat "$rule/pattern")"*)
        cat "$rule/out"; cat "$rule/err" >&2; sleep "$(cat "$rule/seconds")"; exit "$(cat "$rule/code")";;
    esac
done
"""


@pytest.fixture
def fake_engine(tmp_path, monkeypatch):
    engine = docker_api.FakeEngine(tmp_path / "docker.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    yield engine
    engine.close()


class DockerCommand:
    """The stand-in's folder: what it answers, and what it was called with."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "rules").mkdir(parents=True)
        (folder / "docker").write_text(COMMAND)
        (folder / "docker").chmod(0o755)

    def answers(self, pattern, out="", err="", code=0, seconds=0):
        """Answer a call whose arguments contain `pattern`."""
        rule = self.folder / "rules" / f"{len(list((self.folder / 'rules').iterdir())):03}"
        rule.mkdir()
        told = {"pattern": pattern, "out": out, "err": err, "code": code, "seconds": seconds}
        for name, value in told.items():
            (rule / name).write_text(str(value if isinstance(value, str | int | float) else json.dumps(value)))

    @property
    def calls(self):
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def docker_command(tmp_path, monkeypatch):
    command = DockerCommand(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{command.folder}{os.pathsep}{os.environ['PATH']}")
    return command


@pytest.fixture
def no_docker(tmp_path, monkeypatch):
    """A PATH without Docker."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
