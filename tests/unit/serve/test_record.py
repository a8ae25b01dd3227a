"""The record of the running server: believed only if we wrote it, and no key is read that the server does not have."""

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from sparkforge.bench import context
from sparkforge.core import paths
from sparkforge.core.errors import ServerError, StorageError
from sparkforge.core.process import started_at
from sparkforge.doctor import evidence
from sparkforge.serve import access, launch, record

SOMEBODY = 54321


@contextmanager
def process(**environment):
    """A process of ours with these variables, as the server has them."""
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"],
        env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        child.stdout.readline()  # it runs, so its environment is its own
        yield child.pid
    finally:
        child.communicate()


def server_of(pid, key_file=""):
    return record.Server(pid, started_at(pid), "127.0.0.1", 9, "/m", "m", "embedded", "", key_file=str(key_file))


@pytest.fixture
def written():
    with process() as pid:
        server = server_of(pid)
        record.write(server)
        yield server


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("sesame\n")
    path.chmod(0o600)
    return path


def test_a_record_and_its_folder_are_ours_alone(written):
    paths.state().chmod(0o755)
    record.write(written)
    assert record.running() == written
    assert paths.state().stat().st_mode & 0o777 == 0o700
    assert record.record_path().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606, 0o640])
def test_a_record_that_others_can_open_is_not_believed(written, mode):
    record.record_path().chmod(mode)
    with pytest.raises(
        StorageError, match=r"is not believed .* chmod 600", check=lambda error: error.code == "storage.access"
    ):
        record.running()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_a_record_in_a_folder_that_others_can_write_is_not_believed(written, mode):
    paths.state().chmod(mode)
    with pytest.raises(
        StorageError, match=r"is not believed .* chmod 700", check=lambda error: error.code == "storage.access"
    ):
        record.running()


def test_a_record_of_another_user_is_not_believed(written, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    with pytest.raises(
        StorageError, match=f"we are uid {SOMEBODY}", check=lambda error: error.code == "storage.access"
    ):
        record.read()


def test_a_link_a_fifo_and_a_folder_are_not_believed(written, tmp_path):
    path = record.record_path()
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(StorageError, match="it is a link", check=lambda error: error.code == "storage.access"):
        record.read()
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(StorageError, match="no regular file", check=lambda error: error.code == "storage.access"):
        record.read()
    path.unlink()
    path.mkdir(0o700)
    with pytest.raises(StorageError, match="no regular file", check=lambda error: error.code == "storage.access"):
        record.read()


def test_every_command_refuses_such_a_record(written):
    record.record_path().chmod(0o644)
    for command in (launch.stop, lambda: launch.check_free(8000), context.running_server):
        with pytest.raises(StorageError, match="is not believed", check=lambda error: error.code == "storage.access"):
            command()
    assert evidence.collect_state(paths.state()).server is None  # the doctor goes on without it


def test_a_process_of_another_user_is_not_our_server(written, monkeypatch):
    monkeypatch.setattr(psutil.Process, "uids", lambda _self: SimpleNamespace(real=SOMEBODY))
    with pytest.raises(ServerError, check=lambda error: error.code == "server.not-running"):
        record.running()


def test_the_key_is_that_of_the_process(key_file):
    with process(**access.variables("sesame", str(key_file))) as pid:
        assert server_of(pid, key_file).key == "sesame"
        assert server_of(pid).key == ""


def test_a_file_that_the_process_was_not_started_with_is_no_key(key_file, tmp_path):
    (tmp_path / "diary").write_text("dear-diary")
    (tmp_path / "diary").chmod(0o600)
    with process(**access.variables("sesame", str(key_file))) as pid:
        for forged in (server_of(pid, tmp_path / "diary"), server_of(os.getpid(), tmp_path / "diary")):
            with pytest.raises(
                StorageError, match="was not started with that file", check=lambda error: error.code == "storage.access"
            ):
                _ = forged.key
    with pytest.raises(
        StorageError, match="was not started with that file", check=lambda error: error.code == "storage.access"
    ):  # it has ended
        _ = dataclasses.replace(forged, pid=pid).key


def test_a_containers_key_is_the_one_that_it_mounts(fake_engine, key_file, tmp_path):
    fake_engine.container["Mounts"] = [
        {"Source": str(tmp_path / "models"), "Destination": "/models"},
        {"Source": str(key_file), "Destination": "/run/secrets/api_key"},
    ]
    server = record.Server(0, 0.0, "127.0.0.1", 9, "/m", "m", "docker", "", "c0ffee", str(key_file))
    assert server.key == "sesame"
    with pytest.raises(
        StorageError, match="was not started with that file", check=lambda error: error.code == "storage.access"
    ):
        _ = dataclasses.replace(server, key_file=str(tmp_path / "diary")).key
    fake_engine.container["Mounts"] = []
    with pytest.raises(
        StorageError, match="was not started with that file", check=lambda error: error.code == "storage.access"
    ):
        _ = server.key


def test_a_record_that_is_endless_is_none():
    paths.secure_state()
    record.record_path().write_text(json.dumps({"model": "x" * (1 << 20)}))
    record.record_path().chmod(0o600)
    assert record.read() is None
