"""A node's part of a server ends if another node ends, is silent or does not connect, and otherwise does not."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_for

from sparkforge.serve import supervise
from sparkforge.serve.cluster import node, watch

SECRET = "token-of-this-start"
FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def start(tmp_path, free_port):
    running, port = [], free_port()

    def start(name, peers, command=FOREVER, token=SECRET, listen=False, join="20", under=list):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        options = watch.options(name, "127.0.0.1", port, peers, listen=listen)
        argv = list(watch.watched(command, options))
        argv[argv.index("--") : argv.index("--")] = ["--join", join]
        with (folder / "log").open("w") as log:
            environment = {**os.environ, watch.TOKEN: token}
            process = subprocess.Popen(under(argv), env=environment, stdout=log, stderr=log, start_new_session=True)
        running.append(process)
        process.folder, process.port = folder, port
        return process

    yield start
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also its command, which survives a killed watch
        process.wait()
        assert "Traceback" not in (process.folder / "log").read_text()


@pytest.fixture
def both(start):
    head = start("head", ["worker"], listen=True)
    worker = start("worker", ["head"])
    wait_for(lambda: joined(head) == {"worker"})
    return head, worker


def joined(head):
    """Return the nodes whose hello the head has read; other connections may wait in the head's backlog."""
    return {line.split()[1] for line in (head.folder / "log").read_text().splitlines() if line.endswith(" joined")}


def end(process):
    return node.loss((process.folder / "log").read_text())


def child(process):
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(file.read_text)  # proc(5): a child can be missing for a moment
    (pid,) = file.read_text().split()
    return int(pid)


@pytest.mark.parametrize(("dying", "living"), [(1, 0), (0, 1)], ids=["worker", "head"])
def test_a_killed_server_ends_the_other_nodes_by_name(both, dying, living, ended):
    server = child(both[living])
    os.kill(child(both[dying]), signal.SIGKILL)
    assert both[living].wait(15) == 24
    name = both[dying].folder.name
    assert end(both[living]) == (name, "signal 9 ended its server")
    assert ended(server, 1)
    assert both[dying].wait(15) == 24


def test_a_killed_watch_counts_as_a_lost_node(both):
    head, worker = both
    os.kill(child(worker), signal.SIGKILL)  # nothing reaps it in this test
    worker.kill()
    assert head.wait(15) == 24
    assert end(head)[0] == "worker"


@pytest.mark.parametrize(("guard", "why"), [(False, "it was stopped"), (True, "its memory guard ended it")])
def test_a_stop_ends_the_others_and_says_whether_it_was_the_memory_guards(both, guard, why):
    head, worker = both
    if guard:
        head.send_signal(signal.SIGURG)  # which the supervisor sends first (serve/supervise.py)
    head.send_signal(signal.SIGTERM)
    assert head.wait(15) == 128 + signal.SIGTERM
    assert worker.wait(15) == 24
    assert end(worker) == ("head", why)
    assert end(head) is None


def test_an_end_by_a_killed_supervisor_is_not_a_requested_end(start):
    """The kernel then sends SIGTERM to watch.py, as for a requested end."""
    head, worker = start("head", ["worker"], listen=True, under=supervise.supervised), start("worker", ["head"])
    wait_for(lambda: joined(head) == {"worker"})
    head.kill()
    assert worker.wait(15) == 24
    assert end(worker) == ("head", "its supervisor was killed")


@pytest.mark.slow
def test_a_node_that_does_not_come_ends_the_others(start):
    head = start("head", ["worker", "third"], listen=True, join="1")
    assert head.wait(15) == 24
    assert end(head) == ("third, worker", "it did not connect within 1 s")


STRANGERS = [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 20000, b"[" * 4000 + b"\n"]


@pytest.mark.parametrize("data", [*STRANGERS, b'{"hello": "worker", "token": "guess"}\n{"end": "x"}\n'], ids=range(5))
def test_a_stranger_is_dropped_and_changes_nothing(both, data):
    head, worker = both
    with socket.create_connection(("127.0.0.1", head.port), timeout=5) as stranger, suppress(OSError):
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while received := stranger.recv(100):
            assert b"token" not in received
    with socket.create_connection(("127.0.0.1", head.port), timeout=5) as next_one:  # still listening
        next_one.sendall(b"x\n")
        assert next_one.recv(100) == b""
    assert (head.poll(), worker.poll()) == (None, None)


def listening(port):
    rows = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(local.endswith(f":{port:04X}") and state == "0A" for local, _, state in rows)


def test_the_server_does_not_get_the_token(start, tmp_path):
    show = [sys.executable, "-c", f"import os; open({str(tmp_path / 'variables')!r}, 'w').write(str(dict(os.environ)))"]
    assert start("head", ["worker"], show, listen=True).wait(15) == 24
    assert SECRET not in (tmp_path / "variables").read_text()


def test_a_server_that_ends_before_the_head_has_read_a_hello_is_named_all_the_same(start):
    """The worker's connection waits in the backlog, because the head's process is stopped until its server is dead."""
    head = start("head", ["worker"], listen=True)
    wait_for(lambda: listening(head.port))
    server = child(head)
    head.send_signal(signal.SIGSTOP)
    os.kill(server, signal.SIGKILL)
    with socket.create_connection(("127.0.0.1", head.port), timeout=5) as worker:
        worker.sendall(json.dumps({"hello": "worker", "token": SECRET}).encode() + b"\n")
        head.send_signal(signal.SIGCONT)
        lines = b""
        while received := worker.recv(100):
            lines += received
    assert json.loads(lines.splitlines()[-1]) == {"node": "head", "end": "signal 9 ended its server"}
