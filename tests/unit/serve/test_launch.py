"""Start and stop, with a small real server in vLLM's place: an OpenAI-shaped program that behaves or misbehaves."""

import os
import signal
import socket
import sys
import textwrap

import psutil
import pytest

from serve import client, embedded, launch, logs, record, screen
from serve.launch import Launch
from sparkforge import interrupt
from sparkforge.errors import (
    AlreadyRunningError,
    BusyError,
    DiskFullError,
    ModelError,
    NotRunningError,
    PortTakenError,
    ServerReplyError,
    StartFailedError,
    UsageError,
)
from sparkforge.files import locked
from sparkforge.paths import state
from sparkforge.process import session_members, started_at

# argv: port, behaviour.
SERVER = textwrap.dedent("""
    import http.server, json, subprocess, sys, time
    port, behaviour = int(sys.argv[1]), sys.argv[2]
    print("INFO 11-21 03:40:12 [core.py:1] Starting to load model x", flush=True)
    if behaviour == "dies":
        print("(EngineCore pid=7) ERROR 11-21 03:40:13 [core.py:99] RuntimeError: no such kernel", flush=True)
        sys.exit(1)
    if behaviour == "has children":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    class Api(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200 if behaviour != "unhealthy" else 503, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body.get("stream"):
                return self.stream()
            if behaviour == "cannot generate":
                return self.reply(500, {"error": {"message": "no kernel image is available"}})
            if behaviour == "answers a list":
                return self.reply(200, ["hi"])
            if behaviour == "answers null":
                return self.reply(200, {"choices": [{"text": "hi"}], "usage": None})
            count = 0 if behaviour == "lies" else 1
            self.reply(200, {"choices": [{"text": "hi"}], "usage": {"completion_tokens": count}})

        def stream(self):
            self.send_response(200)
            self.end_headers()
            for piece in ({"reasoning": "hm "}, {"content": "Hel"}, {"content": "lo"}, {"content": None}):
                self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": piece}]}).encode() + b"\\n\\n")
            if behaviour.startswith("{") or behaviour.startswith("["):
                self.wfile.write(b"data: " + behaviour.encode() + b"\\n\\n")
            self.wfile.write(b"" if behaviour == "truncates" else b"data: [DONE]\\n\\n")

        def reply(self, status, value):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *args):
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Api).serve_forever()
""")


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def begin(port, tmp_path):
    def begin(behaviour="good", timeout=20.0):
        state().mkdir(exist_ok=True)
        command = (sys.executable, "-c", SERVER, str(port), behaviour)
        return launch.start(Launch(command, {}, tmp_path, "m", "embedded", port, timeout=timeout), told.append)

    told = []
    begin.told = told
    yield begin
    server = record.read()
    if server and server.alive:
        launch.stop()


def nothing_is_left(begin, port):
    assert record.read() is None
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(port) in (p.info["cmdline"] or [])]
    assert [p for p in mine if p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_started_server_answers_is_recorded_and_stops(begin, port, capsys):
    server = begin()
    assert record.running() == server
    assert server.url == f"http://127.0.0.1:{port}"
    assert begin.told
    assert logs.milestone(record.log_path()) == "loading the model"
    screen.show_status(server)
    screen.show_chat(server, "hello", 8)
    out = capsys.readouterr().out
    assert "· healthy ·" in out
    assert "hm Hello\n" in out
    assert launch.stop() == server
    nothing_is_left(begin, port)
    with pytest.raises(NotRunningError, match=r"\./inv up"):
        launch.stop()


def test_every_process_of_a_server_ends_with_it(begin):
    server = begin("has children")
    members = session_members(server.pid)
    assert len(members) == 2
    launch.stop()
    assert [pid for pid in members if started_at(pid) is not None] == []


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("dies", "RuntimeError: no such kernel"),
        ("cannot generate", "no kernel image is available"),
        ("lies", "completion_tokens"),
        ("answers a list", "TypeError"),
        ("answers null", "TypeError"),
    ],
)
def test_a_start_that_fails_shows_why_and_leaves_nothing(begin, port, behaviour, told):
    with pytest.raises(StartFailedError) as caught:
        begin(behaviour)
    assert told in str(caught.value)
    assert "03:40:13" not in caught.value.why  # vLLM's log prefix says nothing to a user
    assert str(record.log_path()) in caught.value.fix
    nothing_is_left(begin, port)


def test_a_server_that_never_gets_healthy_is_ended_at_the_deadline(begin, port):
    with pytest.raises(StartFailedError, match="in time"):
        begin("unhealthy", timeout=2.0)
    nothing_is_left(begin, port)


def test_ctrl_c_while_starting_leaves_nothing(begin, port, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "wait_until_serving", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin()
    nothing_is_left(begin, port)


def test_a_server_that_cannot_be_recorded_is_ended(begin, port, monkeypatch):
    def full(_server):
        raise DiskFullError("cannot write", "the file system is full", "free some space")

    monkeypatch.setattr(record, "write", full)
    with pytest.raises(DiskFullError):
        begin()
    nothing_is_left(begin, port)


def test_ctrl_c_while_it_is_recorded_leaves_nothing(begin, port, monkeypatch, nothing_is_ignored):
    def interrupted(server):
        os.kill(os.getpid(), signal.SIGINT)
        write(server)

    write = record.write
    monkeypatch.setattr(record, "write", interrupted)
    with interrupt.caught(), pytest.raises(KeyboardInterrupt):
        begin()
    nothing_is_left(begin, port)


def test_a_second_start_is_refused_and_the_first_lives(begin, port):
    server = begin()
    with pytest.raises(AlreadyRunningError, match=str(port)):
        begin()
    assert record.running() == server


def test_a_start_while_another_starts_is_refused(begin):
    with locked(state() / "serve.lock", "start"), pytest.raises(BusyError):
        begin()


def test_a_taken_port_is_named_before_anything_starts(begin, port):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTakenError, match=f"--port {port + 1}"):
        begin()
    assert record.read() is None


@pytest.mark.parametrize("wrong", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(wrong):
    with pytest.raises(UsageError):
        launch.check_free(wrong)


def test_a_record_of_a_dead_process_or_broken_json_is_no_server(begin):
    server = begin()
    launch.stop()
    record.write(server)
    with pytest.raises(NotRunningError, match="has ended"):
        record.running()
    record.write(record.Server(**{**vars(server), "pid": os.getpid()}))  # the id now belongs to another process
    with pytest.raises(NotRunningError):
        record.running()
    record.record_path().write_text("{")
    assert record.read() is None


def test_a_stream_that_breaks_off_is_an_error_after_what_came(begin, capsys):
    server = begin("truncates")
    with pytest.raises(ServerReplyError, match="DONE"):
        screen.show_chat(server, "hello", 8)
    assert "Hello" in capsys.readouterr().out


@pytest.mark.parametrize("event", ["{not json", "[1]", '{"choices": 5}', '{"choices": [{"delta": null}]}'])
def test_a_stream_of_another_shape_is_an_error(begin, event):
    with pytest.raises(ServerReplyError, match="broke off"):
        screen.show_chat(begin(event), "hello", 8)


def test_the_log_of_the_last_start_is_kept_and_shown(begin, capsys):
    with pytest.raises(NotRunningError, match="no log"):
        screen.show_log(follow=False)
    with pytest.raises(StartFailedError):
        begin("dies")
    begin()
    screen.show_log(follow=False)
    assert "Starting to load" in capsys.readouterr().out
    assert "no such kernel" in record.log_path().with_name("server.previous.log").read_text()


def test_staying_shows_the_log_and_names_a_server_that_ends_by_itself(begin, monkeypatch):
    server = begin()
    psutil.Process(server.pid).kill()
    with pytest.raises(StartFailedError, match="by itself"):
        screen.stay(server)
    assert record.read() is None


def test_ctrl_c_while_staying_stops_the_server(begin, port, monkeypatch):
    server = begin()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "follow", interrupted)
    screen.stay(server)
    nothing_is_left(begin, port)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"model_type": "llama"}'])
def test_a_folder_that_is_no_model_is_refused_before_anything_is_set_up(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError):
        embedded.check(str(tmp_path), "")
    with pytest.raises(UsageError, match="--profile safe"):
        embedded.check("", "safe")


def test_relevant_lines_leave_out_frames_and_fall_back_to_the_last(tmp_path):
    log = tmp_path / "log"
    log.write_text('a\nINFO 11-21 03:40:12 [x.py:1] b\n  File "x.py", line 1\n    ^^^\n')
    assert logs.relevant(log) == ["a", "b"]
    log.write_text(
        "ERROR 11-21 03:40:12 [x.py:1] disk: No space left\nERROR 11-21 03:40:13 [x.py:1] disk: No space left\nok\n"
    )
    assert logs.relevant(log) == ["disk: No space left"]
    assert logs.relevant(tmp_path / "absent") == []
