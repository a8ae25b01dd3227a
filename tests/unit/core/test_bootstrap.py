"""`./inv` itself, run as by a user, in a copy of its files with a separate lock."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import write_files, write_program

from sparkforge.core import bootstrap
from sparkforge.core.errors import ProcessError
from sparkforge.core.paths import ROOT

# Replaces the commands, so that these tests install nothing.
FAKE_COMMANDS = "import os, sys; print('run', *sys.argv[1:], 'in', os.environ['INV_CWD'])"


@pytest.fixture
def checkout(tmp_path):
    core = ("__init__.py", "bootstrap.py", "errors.py", "installers.py", "installers.toml")
    for name in ("inv", "sparkforge/__init__.py", *(f"sparkforge/core/{file}" for file in core)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    made = {"locks/tools.txt": "# nothing to install\n", "sparkforge/cli/__main__.py": FAKE_COMMANDS}
    return write_files(tmp_path, made)


def inv(checkout, *args, **env):
    env = {**os.environ, "PYTHON": sys.executable, **env}
    return subprocess.run([checkout / "inv", *args], env=env, capture_output=True, text=True, check=False)


def test_sudo_makes_no_environment_in_another_users_checkout(checkout, monkeypatch):
    monkeypatch.setenv("SUDO_UID", "1000")
    if os.geteuid() == 0:
        os.chown(checkout, 1000, 1000)
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0)
    with pytest.raises(ProcessError, match="not made with sudo") as refused:
        bootstrap.main(checkout)
    assert refused.value.fix.startswith(f"{checkout}/inv --list")
    assert not (checkout / ".venv").exists()
    assert not (checkout / ".sparkforge").exists()


def test_no_python_is_an_error_with_the_command_that_installs_one(checkout, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "cmp", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    result = subprocess.run([checkout / "inv"], env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert "apt install python3" in result.stderr


def test_a_folder_that_is_not_ours_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").touch()
    result = inv(checkout)
    assert result.returncode == ProcessError.exit_code
    assert "mv " in result.stderr
    assert (checkout / ".venv" / "precious").exists()


@pytest.mark.slow
def test_a_lock_that_cannot_be_installed_is_named(checkout):
    (checkout / "locks" / "tools.txt").write_text("nothing-of-this-name==1\n")  # without a hash: pip asks no index
    result = inv(checkout)
    assert result.returncode == ProcessError.exit_code
    assert "cannot install locks/tools.txt" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (checkout / ".venv" / ".complete").exists()


@pytest.mark.slow
def test_ctrl_c_in_the_first_run_gives_no_traceback_and_the_next_run_completes_it(checkout, signals_not_ignored):
    old = write_program(checkout / "old-python", "exit 1")  # must be skipped
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHON": sys.executable}
    process = subprocess.Popen([checkout / "inv"], env=environment, start_new_session=True, **pipes)
    while not (checkout / ".venv" / ".made-by-sparkforge").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in errors
    assert not (checkout / ".venv" / ".complete").exists()
    second = inv(checkout, "up", "--port", "1", PYTHON=str(old))
    assert (second.returncode, second.stdout) == (0, f"run up --port 1 in {Path.cwd()}\n"), second.stderr
    assert "First run" in second.stderr
    third = inv(checkout, "up")
    assert (third.returncode, third.stdout, third.stderr) == (0, f"run up in {Path.cwd()}\n", "")


@pytest.mark.parametrize("refused", ["", "an index with a client's certificate"])
def test_the_stamp_is_written_after_the_environment_is_on_the_disk(tmp_path, monkeypatch, refused):
    """If uv refuses, pip installs the packages."""
    venv, lock, events = tmp_path / ".venv", tmp_path / "tools.txt", []
    lock.write_text("uv==1 \\\n    --hash=sha256:1\nother==2 \\\n    --hash=sha256:2\n")

    def run(command, **_):
        if "config" not in command:
            events.append(command[2])
        return subprocess.CompletedProcess(command, bool(refused) and command[2] == "uv", "", refused)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bootstrap.os, "sync", lambda: events.append(("sync", bootstrap.is_complete(venv, lock))))
    bootstrap.make(venv, lock)
    assert events == ["venv", "pip", "uv", *(["pip"] if refused else []), ("sync", False)]
    assert bootstrap.is_complete(venv, lock)
    assert (venv / "uv.txt").read_text() == "uv==1 \\\n    --hash=sha256:1\n"
    lock.write_text("# something else\n")
    assert not bootstrap.is_complete(venv, lock)


def test_uv_gets_pips_index_and_certificates(tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://a.test/simple\n[install]\ncert = /a.pem\n")
    for name in ("PIP_INDEX_URL", "PIP_CERT", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    variables = bootstrap.uv_variables(sys.executable)
    assert (variables["UV_DEFAULT_INDEX"], variables["SSL_CERT_FILE"]) == ("http://a.test/simple", "/a.pem")
    monkeypatch.setenv("PIP_INDEX_URL", "http://b.test/simple")
    assert bootstrap.uv_variables(sys.executable)["UV_DEFAULT_INDEX"] == "http://b.test/simple"
