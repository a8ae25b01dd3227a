"""SIGTERM and SIGHUP to real commands: all programs that they started end, and the exit code gives the signal."""

import os
import signal
import subprocess
import sys
import time

import pytest
from waiting import wait_for

from sparkforge.core import interrupt
from sparkforge.core.paths import ROOT
from sparkforge.core.process import started_at

# Commands as in sparkforge.cli. Each starts programs that start programs.
TASKS = '''
import sys, time
from pathlib import Path
from invoke.collection import Collection
from sparkforge.compile import jobs
from sparkforge.core import memory
from sparkforge.compile.jobs import Site, Unit
from sparkforge.cli.command import task
from sparkforge.core.files import locked, write_atomic
from sparkforge.core.process import call, run

NEST = "sleep 600 & echo $! >> pids; echo $$ >> pids; wait"

@task()
def plan(_ctx):
    """Run two units."""
    units = [Unit(f"u{n}", ("sh", "-c", NEST)) for n in range(2)]
    made = jobs.make_schedule([unit.name for unit in units], memory.Machine(1 << 40, 2))
    jobs.run(units, made, Site({}, Path("logs"), Path("lock")))

@task()
def program(_ctx):
    """Run a program that runs programs, as ninja and cmake do."""
    with locked(Path("lock"), "test"):
        run(["sh", "-c", f"sh -c '{NEST}' & sh -c '{NEST}' & wait"])
    write_atomic(Path("trusted"), "")

@task()
def shown(_ctx):
    """Run a program on our own terminal."""
    call(["sh", "-c", f"sh -c '{NEST}' & sh -c '{NEST}' & wait"], cwd=Path(), env={})

@task()
def stays(_ctx):
    """Catch the exception of Ctrl-C, as a command that shows a log does."""
    try:
        Path("pids").write_text("")
        time.sleep(600)
    except KeyboardInterrupt:
        print("tidied", flush=True)

namespace = Collection(plan, program, shown, stays)
'''


pytestmark = pytest.mark.usefixtures("signals_not_ignored")


def begin(folder, name, pids=4):
    (folder / "tasks.py").write_text(TASKS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARKFORGE_STATE": str(folder / "state")}
    command = [sys.executable, "-m", "invoke", "--search-root", folder, name]
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)
    listed = folder / "pids"
    wait_for(lambda: started.poll() is not None or (listed.exists() and len(listed.read_text().split()) >= pids))
    assert started.poll() is None, started.communicate()
    return started, [int(word) for word in listed.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [("plan", signal.SIGTERM, 143), ("plan", signal.SIGHUP, 129), ("program", signal.SIGTERM, 143),
     ("program", signal.SIGINT, 130), ("shown", signal.SIGTERM, 143)],
)  # fmt: skip
def test_a_signal_ends_a_verb_and_all_that_it_started(tmp_path, verb, number, code):
    started, pids = begin(tmp_path, verb)
    started.send_signal(number)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == code
    assert [started_at(pid) for pid in pids] == [None] * 4
    assert number.name in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "trusted").exists()


def test_a_verb_that_catches_the_exception_still_ends_with_the_signals_code(tmp_path):
    started, _ = begin(tmp_path, "stays", pids=0)
    started.send_signal(signal.SIGTERM)
    out, _ = started.communicate(timeout=60)
    assert (started.returncode, out) == (143, "tidied\n")


def send(number):
    os.kill(os.getpid(), number)


def hold_and_send(seen):
    with interrupt.caught():
        with interrupt.held():
            with interrupt.held():
                send(signal.SIGTERM)
            seen.append("inner")
            time.sleep(0.05)
            seen.append("outer")
        seen.append("not reached")


def test_a_signal_waits_while_it_is_held_back():
    seen = []
    with pytest.raises(interrupt.TerminatedError) as raised:
        hold_and_send(seen)
    assert seen == ["inner", "outer"]
    assert raised.value.number == signal.SIGTERM == interrupt.ending()


def test_handlers_are_put_back_and_an_ignored_signal_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt.caught():
            send(signal.SIGHUP)  # nohup
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, former)
