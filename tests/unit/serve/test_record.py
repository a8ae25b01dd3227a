"""The record of the running server: trusted only if we wrote it; only the server's own key is read."""

import dataclasses
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from expected import refused
from servers import recorded

from sparkforge.bench import context
from sparkforge.core import paths
from sparkforge.core.errors import StorageError
from sparkforge.doctor import evidence
from sparkforge.serve import access, launch, record

SOMEBODY = 54321


@contextmanager
def process(**environment):
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"],
        env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        child.stdout.readline()  # after exec its environment is final
        yield child.pid
    finally:
        child.communicate()


def server_of(pid, key_file=""):
    return recorded(pid=pid, key_file=str(key_file))


@pytest.fixture
def written():
    with process() as pid:
        server = server_of(pid)
        record.write(server)
        yield server


def test_a_record_and_its_folder_are_ours_alone(written):
    paths.state().chmod(0o755)
    record.write(written)
    assert record.running() == written
    assert paths.state().stat().st_mode & 0o777 == 0o700
    assert record.record_path().stat().st_mode & 0o777 == 0o600
    assert recorded(8000, host="::1").url == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("place", "mode", "right"),
    [
        *((record.record_path, mode, 600) for mode in (0o606, 0o640)),
        *((paths.state, mode, 700) for mode in (0o770, 0o707)),
    ],
)
def test_a_record_that_others_can_open_or_replace_is_not_believed(written, place, mode, right):
    place().chmod(mode)
    for command in (record.running, launch.stop, lambda: launch.check_free(8000), context.running_server):
        with refused("storage.access", f"is not trusted .* chmod {right}"):
            command()
    assert evidence.collect_state(paths.state()).server is None  # the doctor continues without the record


def test_a_record_or_a_process_of_another_user_is_not_ours(written, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: SOMEBODY)
        with pytest.raises(StorageError, match=f"this process is uid {SOMEBODY}"):
            record.read()
    monkeypatch.setattr(psutil.Process, "uids", lambda _self: SimpleNamespace(real=SOMEBODY))
    with refused("server.not-running"):
        record.running()


def test_a_link_a_fifo_and_a_folder_are_not_believed(written, tmp_path):
    path = record.record_path()
    path.rename(tmp_path / "elsewhere.json")
    for make, why in (
        (lambda: path.symlink_to(tmp_path / "elsewhere.json"), "it is a link"),
        (lambda: os.mkfifo(path, 0o600), "not a regular file"),
        (lambda: path.mkdir(0o700), "not a regular file"),
    ):
        make()
        with pytest.raises(StorageError, match=why):
            record.read()
        if not path.is_dir():
            path.unlink()


NOT_STARTED_WITH = "was not started with that file"


def test_the_key_is_that_of_the_process_and_no_other_file_is_one(key_file, tmp_path):
    (tmp_path / "diary").write_text("dear-diary")
    (tmp_path / "diary").chmod(0o600)
    with process(**access.variables("sesame", str(key_file))) as pid:
        assert server_of(pid, key_file).key == "sesame"
        assert server_of(pid).key == ""
        forged = [server_of(pid, tmp_path / "diary"), server_of(os.getpid(), tmp_path / "diary")]
        for server in forged:
            with refused("storage.access", NOT_STARTED_WITH):
                _ = server.key
    with refused("storage.access", NOT_STARTED_WITH):  # the process has ended
        _ = dataclasses.replace(forged[0], key_file=str(key_file)).key


def test_a_containers_key_is_the_one_that_it_mounts(fake_engine, key_file, tmp_path):
    mounts = {"/models": tmp_path / "models", "/run/secrets/api_key": key_file}
    fake_engine.container["Mounts"] = [{"Source": str(path), "Destination": at} for at, path in mounts.items()]
    server = recorded(container="c0ffee", key_file=str(key_file))
    assert server.key == "sesame"
    with refused("storage.access", NOT_STARTED_WITH):
        _ = dataclasses.replace(server, key_file=str(tmp_path / "diary")).key
    fake_engine.container["Mounts"] = []
    with refused("storage.access", NOT_STARTED_WITH):
        _ = server.key
