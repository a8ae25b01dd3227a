"""How long a container waits before it starts its server again, how a service holds, and what the health check says."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import misbehaving
import pytest
from waiting import wait_for

from sparkforge.core import paths
from sparkforge.core.errors import RefusalError
from sparkforge.core.paths import ROOT
from sparkforge.serve import health, hold, record, restarts

WHO = ("host", "vllm", "--model", "/models/x")


def ends(code=24, asked=False, why="", at=None):
    end = {"pid": 1, "code": code, "asked": asked, "time": at or time.time(), "why": why}
    record.end_path().write_text(json.dumps(end))


def known():
    return restarts.read(WHO, time.time()).failures


def test_an_unrequested_end_counts_once_with_its_reason():
    reason = "this machine has 1.0 GiB of 119.7 GiB left"
    restarts.begin(WHO)
    ends(why=reason)
    restarts._write(restarts.read(WHO, time.time()))
    assert [failure.why for failure in known()] == [reason]
    restarts.begin(WHO)
    ends(code=1)
    assert [failure.why for failure in known()] == [reason, "it ended by itself with exit code 1"]


def test_a_history_that_is_damaged_or_cannot_be_written_prevents_no_start(tmp_path):
    for damage in ("", "[]", '{"identity": 3}', '{"identity": [], "failures": [{}]}'):
        (paths.state() / restarts.NAME).write_text(damage)
        assert known() == ()
    (paths.state() / restarts.NAME).unlink()
    (paths.state() / restarts.NAME).mkdir()  # makes the write fail, as a full disk would
    restarts.begin(WHO)
    restarts.admit(WHO, tmp_path)


def test_a_start_without_an_end_counts_and_old_forgiven_and_foreign_failures_do_not():
    restarts.begin(WHO)
    (failure,) = known()
    assert "lost its power" in failure.why
    ends(code=0, asked=True)
    assert known() == ()
    restarts.begin(WHO)
    ends()
    assert len(known()) == 1
    assert restarts.read(WHO, time.time() + restarts.WINDOW_SECONDS + 1).failures == ()
    assert restarts.read((*WHO, "--max-model-len=1024"), time.time()).failures == ()


def test_too_many_failures_hold_the_container_until_a_signal_forgives_them(tmp_path):
    for _ in range(restarts.MAX_FAILURES):
        restarts.begin(WHO)
        ends(why="it was out of memory")
    program = (
        "import signal, sys; from pathlib import Path; from sparkforge.serve import restarts;"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143));"
        f"restarts.admit({WHO!r}, Path(sys.argv[1])); print('it starts')"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    held = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, **pipes)
    try:
        wait_for(lambda: held.poll() is not None or (tmp_path / health.HELD_FILE).exists())
        assert held.poll() is None, held.communicate()[0]
        assert "the last time it was out of memory" in health.look(tmp_path)
        held.send_signal(signal.SIGTERM)
        out, _ = held.communicate(timeout=60)
    finally:
        held.kill()
        held.wait()
    assert held.returncode == 143
    assert "[server.restarts]" in out
    assert "it starts" not in out
    assert known() == ()


def test_each_failure_waits_longer_and_says_why(tmp_path, pauses, capsys):
    for _ in range(2):
        restarts.begin(WHO)
        ends(why="it was out of memory", at=time.time())
        restarts.admit(WHO, tmp_path)
    assert pauses == pytest.approx([2, 8], abs=1)
    assert "it was out of memory" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


@pytest.fixture
def ready(tmp_path):
    """Return a function that writes a readiness file, and returns its folder."""

    def ready(host, port):
        (tmp_path / "ready").write_text(json.dumps({"host": host, "port": port}))
        return tmp_path

    return ready


def test_a_validated_server_that_answers_is_healthy(ready, monkeypatch, capsys):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with misbehaving.answering() as port:
        monkeypatch.setenv("SPARKFORGE_RUN", str(ready("127.0.0.1", port)))
        assert health.main() == 0
    assert capsys.readouterr().out == "healthy\n"
    assert health.look(ready("127.0.0.1", 0)) == ""  # a worker has no API


def test_a_server_that_does_not_answer_well_or_is_not_ready_is_not_healthy(ready, tmp_path, monkeypatch):
    assert "validation has not passed" in health.look(tmp_path)
    for broken in (b"[]", b'{"host": "127.0.0.1", "port": "x"}', b"\xff"):
        (tmp_path / "ready").write_bytes(broken)
        assert "cannot read" in health.look(tmp_path)
    with misbehaving.answering("unhealthy") as port:
        assert health.look(ready("127.0.0.1", port)).endswith("answered 503")
    monkeypatch.setattr(health, "SECONDS", 0.2)
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as silent:
        bound.bind(("127.0.0.1", 0))  # not listening
        for address in (bound.getsockname(), silent.getsockname()):
            assert "does not answer" in health.look(ready(*address))


def test_a_refused_start_that_holds_is_tried_again_until_it_is_admitted(pauses, capsys):
    answers = [RefusalError("the validator refuses to serve", "no memory", "free some")] * 2

    def start():
        if answers:
            raise answers.pop()
        return "served"

    assert hold.hold_start(start) == "served"
    assert pauses == [30, 60]
    assert capsys.readouterr().err.count("refused: the validator refuses to serve: no memory; validates again") == 2


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_in_its_own_words(monkeypatch, tmp_path, abstract):
    name = f"@{tmp_path.name}-notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name[1:]}" if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        hold.tell_systemd(ready=True, status="serves\nX_INJECTED=1")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serves X_INJECTED=1"
    for absent in ("", "/nonexistent/notify"):
        monkeypatch.setenv("NOTIFY_SOCKET", absent)
        hold.tell_systemd(ready=True)
