"""The supervisor's report of a server's end, and the page cache after a start; small programs replace vLLM."""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from waiting import wait_for

from sparkforge.core.errors import ServerError
from sparkforge.serve.supervise import run, supervised

# A fake vLLM: prints its process id, then runs the given code.
FAKE_VLLM = textwrap.dedent("""
    import os, signal, sys, time
    behaviour = sys.argv[1]
    if behaviour == "drains":
        # not print: the signal may come while the line below is being printed
        signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"drained\\n"), os._exit(0)))
    if behaviour == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "is interrupted":  # vLLM while it loads
        signal.signal(signal.SIGTERM, lambda *_: os._exit(130))
    if behaviour == "leaves an engine" and not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(600)
    if behaviour == "leaves an engine":
        os.wait()
        time.sleep(600)
    print(os.getpid(), flush=True)
    if behaviour.isdecimal():
        sys.exit(int(behaviour))
    time.sleep(600)
""")


@pytest.fixture
def serve(tmp_path, signals_not_ignored):
    started = []

    def serve(behaviour):
        command = supervised((sys.executable, "-c", FAKE_VLLM, behaviour), tmp_path / "end.json")
        supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(supervisor)
        lines = iter(supervisor.stdout.readline, "")
        return supervisor, int(next(line for line in lines if line.strip().isdecimal()))

    yield serve
    for supervisor in started:
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()


@pytest.mark.parametrize(
    ("behaviour", "number", "code", "asked"),
    [
        ("0", None, ServerError.exit_code, False),  # an unrequested end is never 0
        ("30", None, 30, False),
        ("sleeps", signal.SIGKILL, 137, False),
        ("drains", signal.SIGTERM, 0, True),
        ("sleeps", signal.SIGTERM, 143, True),
        ("is interrupted", signal.SIGTERM, 143, True),
        ("sleeps", signal.SIGINT, 130, True),
    ],
)
def test_the_exit_code_tells_a_requested_end_from_another(serve, tmp_path, behaviour, number, code, asked):
    supervisor, server = serve(behaviour)
    if number:
        os.kill(supervisor.pid if asked else server, number)
    supervisor.wait(30)
    output = supervisor.stdout.read()  # `communicate` would lose what `readline` has read ahead
    end = json.loads((tmp_path / "end.json").read_text())
    assert (supervisor.returncode, end["code"], end["asked"], end["why"]) == (code, code, asked, "")
    assert (f"ended by itself; exit code {code}" in output) == (not asked)


@pytest.mark.slow
def test_memory_that_runs_out_ends_the_server_by_name(tmp_path):
    """The guard's bound is set above this machine's memory, so that no memory needs to be used up."""
    program = (
        "import sys; from sparkforge.plan import thresholds; from dataclasses import replace;"
        "from sparkforge.serve.supervise import MemoryWatch, run;"
        "limits = replace(thresholds.load(), end_gib=1e6, end_share=1.0, kill_gib=0, grace_seconds=0.5);"
        "outcome = run((sys.executable, '-c', sys.argv[1], 'ignores'), MemoryWatch(limits)); print(outcome)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, FAKE_VLLM], capture_output=True, text=True, check=True, timeout=120
    )
    assert "memory guard: this machine has" in result.stdout
    assert "Outcome(code=24, asked=False, why='this machine has" in result.stdout


@pytest.mark.slow
def test_what_a_killed_server_leaves_ends_with_it(serve, ended):
    supervisor, engine = serve("leaves an engine")
    (server,) = (child for child in psutil.Process(supervisor.pid).children() if child.pid != engine)
    server.kill()
    assert supervisor.wait(30) == 137
    assert ended(engine)


@pytest.mark.slow
def test_a_killed_supervisor_takes_the_server_with_it(serve):
    supervisor, server = serve("drains")
    process = psutil.Process(server)
    supervisor.kill()
    assert supervisor.stdout.read() == "drained\n"  # the pipe closes when the server has ended
    process.wait(30)


SIZE = 8 << 20


def resident(file):
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        window = (ctypes.c_char * SIZE).from_buffer(mapped)
        pages = ctypes.create_string_buffer(SIZE // mmap.PAGESIZE)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(window), ctypes.c_size_t(SIZE), pages)
        del window
        assert not failed
    return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a weight file and another file, both written to the disk and in the page cache."""
    weights, other = tmp_path / "model-00001.safetensors", tmp_path / "tokenizer.json"
    for path in (weights, other):
        path.write_bytes(os.urandom(SIZE))
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if resident(weights) != SIZE:
        pytest.skip("the page cache of this file system cannot be seen")
    with weights.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(weights):
        pytest.skip("this file system keeps its files in memory")
    weights.read_bytes()
    return tmp_path


def test_a_supervised_server_leaves_no_weights_in_the_cache_and_the_rest_stays(checkpoint):
    (checkpoint / "gone.safetensors").symlink_to("/nowhere")
    weights, former = checkpoint / "model-00001.safetensors", signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = os.fork()
    if not child:  # the child becomes a supervisor, whose server runs for 20 seconds
        os._exit(run((sys.executable, "-c", "import time; time.sleep(20)"), None, str(checkpoint)).code)
    wait_for(lambda: not resident(weights))
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    assert resident(checkpoint / "tokenizer.json") == SIZE
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == former
