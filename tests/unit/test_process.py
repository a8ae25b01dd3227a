import os
import sys
import time

import psutil
import pytest

from sparkforge.errors import CommandError
from sparkforge.process import run, session_members, spawn, started_at, terminate_session

# A process that ignores SIGTERM and so does its child: the worst server to stop.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(sys.argv[1], flush=True)
if sys.argv[1] == "parent":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "child"])
time.sleep(600)
"""


def test_the_last_lines_of_a_failed_program_are_in_the_error():
    with pytest.raises(CommandError, match="gave up") as caught:
        run([sys.executable, "-c", "import sys; sys.exit('gave up')"], fix="try again")
    assert caught.value.fix == "try again"


def test_a_program_that_does_not_exist_is_an_error_with_its_name():
    with pytest.raises(CommandError, match="no-such-program"):
        run(["no-such-program"])


def test_output_that_is_not_text_is_no_traceback():
    assert run([sys.executable, "-c", "import os; os.write(1, bytes([255, 254]))"]).stdout == "��"


def wait_for(log, words):
    for _ in range(200):
        if log.exists() and all(word in log.read_text() for word in words):
            return
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def test_a_whole_session_ends_even_if_it_ignores_sigterm(tmp_path):
    log = tmp_path / "log"
    pid = spawn([sys.executable, "-c", STUBBORN, "parent", STUBBORN], log=log, env=dict(os.environ), cwd=tmp_path)
    wait_for(log, ["parent", "child"])
    members = session_members(pid)
    assert len(members) == 2
    assert members[0] == pid
    terminate_session(pid, grace=0.3)
    assert not [p for p in members if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def test_start_time_tells_a_live_process_from_an_ended_one(tmp_path):
    pid = spawn([sys.executable, "-c", "pass"], log=tmp_path / "log", env=dict(os.environ), cwd=tmp_path)
    assert started_at(os.getpid()) == psutil.Process().create_time()
    terminate_session(pid)
    assert started_at(pid) is None
