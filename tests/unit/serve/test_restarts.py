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

from sparkforge.core import files, paths
from sparkforge.core.errors import RefusalError
from sparkforge.core.paths import ROOT
from sparkforge.serve import health, hold, record, restarts
from sparkforge.serve import health as healthy

WHO = ("host", "vllm", "--model", "/models/x")


def ends(code=24, asked=False, why="", at=None):
    end = {"pid": 1, "code": code, "asked": asked, "time": at or time.time(), "why": why}
    record.end_path().write_text(json.dumps(end))


def known():
    return restarts.read(WHO, time.time()).failures


def test_an_unrequested_end_counts_with_its_reason():
    restarts.begin(WHO)
    ends(why="this machine has 1.0 GiB of 119.7 GiB left")
    assert [failure.why for failure in known()] == ["this machine has 1.0 GiB of 119.7 GiB left"]
    restarts._write(restarts.read(WHO, time.time()))
    assert len(known()) == 1  # the same end counts once
    restarts.begin(WHO)
    ends(code=1)
    assert [failure.why for failure in known()][1:] == ["it ended by itself with exit code 1"]


def test_a_full_disk_prevents_no_start(monkeypatch, tmp_path):
    def full(*_args, **_more):
        raise files.disk_full(tmp_path)

    monkeypatch.setattr(restarts, "write_json", full)
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


@pytest.mark.parametrize("damage", ["", "[]", '{"identity": 3}', '{"identity": [], "failures": [{}]}'])
def test_a_damaged_record_is_none(damage):
    (paths.state() / restarts.NAME).write_text(damage)
    assert known() == ()


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


def test_each_failure_waits_longer_and_says_why(tmp_path, monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(2):
        restarts.begin(WHO)
        ends(why="it was out of memory", at=time.time())
        restarts.admit(WHO, tmp_path)
    assert slept == pytest.approx([2, 8], abs=1)
    assert "it was out of memory" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


@pytest.fixture
def ready(tmp_path):
    def ready(host, port):
        (tmp_path / "ready").write_text(json.dumps({"host": host, "port": port}))
        return tmp_path

    return ready


def test_a_validated_server_that_answers_is_healthy(ready, monkeypatch, capsys):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with misbehaving.answering() as port:
        monkeypatch.setenv("SPARKFORGE_RUN", str(ready("127.0.0.1", port)))
        assert healthy.main() == 0
    assert capsys.readouterr().out == "healthy\n"


def test_a_worker_without_an_api_is_healthy_and_a_server_without_readiness_is_not(ready, tmp_path):
    assert "validation has not passed" in healthy.look(tmp_path)
    assert healthy.look(ready("127.0.0.1", 0)) == ""


@pytest.mark.parametrize("text", ["[]", '{"host": "127.0.0.1", "port": "x"}', "\udcff"])
def test_a_broken_readiness_file_is_not_healthy(tmp_path, text):
    (tmp_path / "ready").write_bytes(text.encode(errors="surrogateescape"))
    assert "cannot read" in healthy.look(tmp_path)


def test_a_server_that_does_not_answer_well_is_not_healthy(ready, monkeypatch):
    monkeypatch.setattr(healthy, "SECONDS", 0.2)
    with misbehaving.answering("unhealthy") as port:
        assert healthy.look(ready("127.0.0.1", port)).endswith("answered 503")
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as silent:
        bound.bind(("127.0.0.1", 0))  # not listening
        for address in (bound.getsockname(), silent.getsockname()):
            assert "does not answer" in healthy.look(ready(*address))


REFUSAL = RefusalError("the validator refuses to serve", "no memory", "free some")


def test_a_refused_start_is_tried_again_until_it_is_admitted(monkeypatch):
    waited, reasons, answers = [], [], [REFUSAL, REFUSAL, None]

    def start():
        answer = answers.pop(0)
        if answer:
            raise answer
        return "served"

    monkeypatch.setattr(hold.time, "sleep", waited.append)
    assert hold.until_admitted(start, reasons.append) == "served"
    assert waited == [30, 60]
    assert all(line.startswith("refused: ") and "no memory" in line for line in reasons)


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_in_its_own_words(monkeypatch, tmp_path, abstract):
    name = f"@{tmp_path.name}-notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name[1:]}" if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        hold.tell_systemd(ready=True, status="serves\nX_INJECTED=1")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serves X_INJECTED=1"


def test_without_systemd_nothing_is_told(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    hold.tell_systemd(ready=True)
    monkeypatch.setenv("NOTIFY_SOCKET", "/nonexistent/notify")
    hold.tell_systemd(ready=True)


def test_only_the_option_holds(monkeypatch):
    monkeypatch.setattr(hold, "until_admitted", lambda *_: "held")

    @hold.held
    def up(**_options):
        raise REFUSAL

    assert up(hold=True, model="~/model") == "held"
    with pytest.raises(RefusalError):
        up(hold=False)
