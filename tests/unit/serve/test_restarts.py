"""How long a container waits before it starts its server again, and when it does not."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from waiting import wait_for

from sparkforge.core import files, paths
from sparkforge.core.paths import ROOT
from sparkforge.serve import health, record, restarts

WHO = ("host", "vllm", "--model", "/models/x")


def ends(code=24, asked=False, why="", at=None):
    end = {"pid": 1, "code": code, "asked": asked, "time": at or time.time(), "why": why}
    record.end_path().write_text(json.dumps(end))


def known():
    return restarts.read(WHO, time.time()).failures


def test_an_end_that_nobody_asked_for_counts_with_its_reason():
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
        "import signal, sys; from pathlib import Path; from sparkforge.serve import entrypoint, restarts;"
        "signal.signal(signal.SIGTERM, entrypoint._leave);"
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
