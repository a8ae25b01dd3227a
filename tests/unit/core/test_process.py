import os
import sys

import pytest
from expected import refused
from waiting import wait_for

from sparkforge.core.errors import ProcessError
from sparkforge.core.process import run, session_members, spawn, started_at, terminate_session, terminate_tree

# A process that ignores SIGTERM, with a child that ignores it too, as the hardest server to stop.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(sys.argv[1], flush=True)
if sys.argv[1] == "parent":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "child"])
time.sleep(600)
"""


def test_the_error_has_the_last_lines_of_a_failed_program_also_of_binary_output():
    with refused("process.failed", "gave up") as caught:
        run([sys.executable, "-c", "import sys; sys.exit('gave up')"], fix="try again")
    assert caught.value.fix == "try again"
    assert run([sys.executable, "-c", "import os; os.write(1, bytes([255, 254]))"]).stdout == "��"


def test_a_whole_session_ends_even_if_it_ignores_sigterm(tmp_path, ended):
    log = tmp_path / "log"
    pid = spawn([sys.executable, "-c", STUBBORN, "parent", STUBBORN], log=log, env=dict(os.environ), cwd=tmp_path)
    wait_for(lambda: log.exists() and {"parent", "child"} <= set(log.read_text().split()))
    members = session_members(pid)
    assert len(members) == 2
    assert members[0] == pid
    terminate_session(pid, grace=0.3)
    assert all(map(ended, members))


@pytest.mark.parametrize("pid", [-1, 0, 1, 2**31, 2**70, -(2**70)])
def test_a_number_from_a_damaged_record_ends_no_process(pid, monkeypatch):
    """-1 would kill every process of this user, 0 our own group."""
    signals = []
    monkeypatch.setattr(os, "kill", lambda *arguments: signals.append(arguments))  # a wrong one would end the tests
    assert started_at(pid) is None
    assert session_members(pid) == []
    terminate_session(pid, grace=0.0)
    terminate_tree(pid, grace=0.0)
    assert signals == []


@pytest.mark.slow
def test_a_program_that_does_not_end_in_time_is_ended(tmp_path):
    note = tmp_path / "pid"
    with refused("process.failed", "did not end within 4 s"):
        run(["sh", "-c", f"echo $$ > '{note}'; exec sleep 600"], seconds=4.0)
    assert started_at(int(note.read_text())) is None


def test_a_folder_that_is_not_there_is_named_and_not_the_program(tmp_path):
    """The error once said to install git, although git was installed."""
    with pytest.raises(ProcessError, match=r"gone") as caught:
        run(["git", "status"], cwd=tmp_path / "gone", fix="install git")
    assert caught.value.fix == f"--help   # name an existing folder in place of {tmp_path / 'gone'}"
