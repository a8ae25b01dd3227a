"""Start and stop, with a small real server in vLLM's place: an OpenAI-shaped program that behaves or misbehaves."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import PIPE

import httpx
import misbehaving
import psutil
import pytest

from sparkforge.core import interrupt, openai
from sparkforge.core.errors import (
    InputError,
    ServerError,
    StorageError,
    UsageError,
)
from sparkforge.core.files import locked
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT, state
from sparkforge.core.process import session_members, started_at
from sparkforge.patching import status
from sparkforge.serve import conversation, launch, logs, proof, record, screen
from sparkforge.serve.devices import embedded
from sparkforge.serve.launch import Launch
from sparkforge.serve.plan import StartPlan


@pytest.fixture
def port(free_port):
    return free_port()


@pytest.fixture
def begin(port, tmp_path, ended, monkeypatch):
    monkeypatch.setattr(openai, "POLL_SECONDS", 0.05)

    def begin(behaviour="good", timeout=120.0, changes=("", {})):
        state().mkdir(exist_ok=True)
        command = (sys.executable, misbehaving.__file__, str(port), behaviour, json.dumps(changes))
        return launch.start(
            Launch(command, {}, StartPlan("embedded", model_id="m", port=port), tmp_path, timeout), notices.append
        )

    notices = []
    begin.notices, begin.ended = notices, ended
    yield begin
    server = record.read()
    if server and server.alive:
        launch.stop()


def nothing_is_left(begin, port):
    assert record.read() is None
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(port) in (p.info["cmdline"] or [])]
    assert all(begin.ended(process.pid) for process in mine)


def test_a_started_server_answers_is_recorded_and_stops(begin, port, capsys):
    server = begin()
    assert record.running() == server
    assert server.url == f"http://127.0.0.1:{port}"
    assert begin.notices
    assert logs.milestone(logs.read(record.log_path())) == "loading the model"
    screen.show_status(server)
    conversation.answer_once(server, "hello", 8)
    out = capsys.readouterr().out
    assert "· healthy ·" in out
    assert "hm Hello\n" in out
    assert launch.stop() == server
    nothing_is_left(begin, port)
    with pytest.raises(ServerError, match=r"\./inv up", check=lambda error: error.code == "server.not-running"):
        launch.stop()


def test_every_process_of_a_server_ends_with_it(begin):
    server = begin("has children")
    members = session_members(server.pid)
    assert len(members) == 4  # the supervisor too, and its child that drops the weights' pages
    launch.stop()
    assert [pid for pid in members if started_at(pid) is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dies", "RuntimeError: no such kernel"),
        ("cannot generate", "no kernel image is available"),
        ("fails at tools", "the request for a tool call: /v1/chat/completions answered 500: g++: not found"),
    ],
)
def test_a_start_that_fails_shows_why_and_leaves_nothing(begin, port, behaviour, message):
    with pytest.raises(ServerError, check=lambda error: error.code == "server.start") as caught:
        begin(behaviour)
    assert message in str(caught.value)
    assert "03:40:13" not in caught.value.why  # vLLM's log prefix says nothing to a user
    assert str(record.log_path()) in caught.value.fix
    nothing_is_left(begin, port)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("lies", "completion_tokens"),
        ("answers a list", "answered 200"),
        ("answers null", "TypeError"),
        ("fails at top_logprobs", "answered 500: g++: not found"),
        ("fails at prompt_logprobs", "the request for log probabilities of the prompt"),
        ("fails at response_format", "the request for log probabilities: /v1/chat/completions answered 500: g++"),
    ],
)
def test_a_server_that_answers_wrongly_is_not_ready(behaviour, message):
    def ready(url):
        Endpoint(url, "m", key="").wait_until_serving(time.monotonic() + 60, lambda: True)
        proof.prove(Endpoint(url, "m", key=""), 60)

    with misbehaving.answering(behaviour) as port, pytest.raises(ServerError, match="cannot generate") as caught:
        ready(f"http://127.0.0.1:{port}")
    assert message in caught.value.why


FORM = ("response_format", {"message": {"role": "assistant", "content": None}, "finish_reason": "length"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("messages", {"message": {"role": "user"}}), "the request for a chat: role 'user'"),
        (("logprobs", {"logprobs": {"content": [{"logprob": 0.5, "top_logprobs": []}]}}), "log probabilities: the log"),
        (("logprobs", {"logprobs": None}), "the request for log probabilities: TypeError"),
        (("prompt_logprobs", {"prompt_logprobs": [None]}), "of the prompt: the log probabilities are []"),
        (("response_format", {"message": {"content": '{"city": "Ro'}}), "a JSON answer: the content is no JSON"),
        (("response_format", {"message": {"content": '{"city": "Oslo"}'}}), "JSON answer: the content does not follow"),
        (FORM, "the request for a JSON answer: content is null (finish_reason 'length')"),
        (("tools", {"message": {"content": "It rains."}}), "a tool call: no tool was called; content is 'It rains.'"),
        (
            ("tools", {"message": {"tool_calls": [{"function": {"name": "get_weather", "arguments": "{"}}]}}),
            "the request for a tool call: the arguments are no JSON",
        ),
    ],
)
def test_an_answer_that_clients_cannot_use_is_named(changes, message):
    with misbehaving.answering("good", changes) as port, pytest.raises(ServerError) as caught:
        proof.prove(Endpoint(f"http://127.0.0.1:{port}", "m", key=""), 60)
    assert message in caught.value.why


def test_status_shows_what_the_start_proved(begin, capsys):
    server = begin()
    assert server.proof == dict.fromkeys(proof.CALLS, "")
    screen.show_status(record.running())
    assert "proved: a JSON answer, a JSON answer with a content type, a JSON response, " in capsys.readouterr().out
    screen.show_status(dataclasses.replace(server, proved=0.0, proof={}))  # its start has not ended
    assert "proved nothing" in capsys.readouterr().out


def test_a_known_limit_does_not_keep_a_server_from_being_ready(begin, capsys, monkeypatch):
    limit = proof.Limit("content is null (finish_reason 'length')", "lost, #1")
    mixed = [proof.Limit("content is null (finish_reason 'stop')", "lost, #1")]
    limits = {"a JSON answer": [limit], "a chat": [limit], "a long prompt beside an answer": mixed}
    monkeypatch.setattr(proof, "LIMITS", limits)
    monkeypatch.setattr(status, "queues", lambda *_: [])  # a stack without patches: no canary is sent
    server = begin(changes=FORM)
    called = [name for name, call in proof.CALLS.items() if not call.patch]
    assert server.proof == {
        **dict.fromkeys(called, ""),
        "a JSON answer": "lost, #1",
        "a long prompt beside an answer": "lost, #1",
    }
    screen.show_status(server)
    assert (
        "known limit: a JSON answer (lost, #1), a long prompt beside an answer (lost, #1) · at its start, 2"
        in capsys.readouterr().out
    )


def test_a_stop_string_that_stays_is_a_known_limit():
    with misbehaving.answering("keeps stop strings") as port:
        outcome = proof.prove(Endpoint(f"http://127.0.0.1:{port}", "m", key=""), 60)
    assert [name for name, limit in outcome.items() if limit] == ["a stop string"]


def test_what_a_patch_cures_is_no_limit_where_the_stack_has_it():
    patches = [limit.patch for limits in proof.LIMITS.values() for limit in limits if limit.patch]
    with misbehaving.answering("keeps stop strings") as port, pytest.raises(ServerError, match="stop string: the cont"):
        proof.prove(Endpoint(f"http://127.0.0.1:{port}", "m", key=""), 60, patches=patches)


@pytest.mark.slow
def test_a_server_that_never_gets_healthy_is_ended_at_the_deadline(begin, port):
    with pytest.raises(ServerError, match="in time", check=lambda error: error.code == "server.start"):
        begin("unhealthy", timeout=2.0)
    nothing_is_left(begin, port)


def test_ctrl_c_while_starting_leaves_nothing(begin, port, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Endpoint, "wait_until_serving", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin()
    nothing_is_left(begin, port)


def test_a_server_that_cannot_be_recorded_is_ended(begin, port, monkeypatch):
    def full(_server):
        raise StorageError("cannot write", "the file system is full", "free some space", code="storage.full")

    monkeypatch.setattr(record, "write", full)
    with pytest.raises(StorageError, check=lambda error: error.code == "storage.full"):
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
    with pytest.raises(ServerError, match=str(port), check=lambda error: error.code == "server.running"):
        begin()
    assert record.running() == server


@pytest.mark.slow
def test_two_commands_that_start_a_server_are_told_apart():
    """The second one ends before it makes anything, and names the process of the first."""
    code = "from sparkforge.serve import launch\nwith launch.starting(): print('held', flush=True); input()"
    first = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        command = [sys.executable, "-m", "invoke", "up", "--device", "embedded"]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        first.communicate("")
    assert second.returncode == StorageError.exit_code, second.stderr
    assert f"pid {first.pid}: start a server" in second.stderr
    assert "rm -rf" not in second.stderr
    assert [path.name for path in state().iterdir()] == ["serve.lock"]


def test_a_lost_lock_of_the_models_folder_is_no_advice_to_remove_it(monkeypatch):
    directory = state() / "models" / "tiny-gpt-oss"
    with (
        locked(directory.parent / f".{directory.name}.lock", "write it"),
        pytest.raises(InputError, check=lambda error: error.code == "input.model") as caught,
    ):
        embedded.write_tiny(Path(sys.executable))
    assert f"pid {os.getpid()}" in str(caught.value)
    assert "rm -rf" not in str(caught.value)


def test_an_engine_that_dies_is_an_error_with_a_code(begin):
    server = begin()
    with suppress(httpx.HTTPError):
        httpx.get(f"{server.url}/end")
    psutil.wait_procs([psutil.Process(server.pid)], timeout=120)
    with pytest.raises(
        ServerError,
        match=r"ended by itself .* with exit code 24",
        check=lambda error: error.code == "server.not-running",
    ):
        record.running()
    with pytest.raises(ServerError, match="by itself", check=lambda error: error.code == "server.start"):
        screen.stay(server)


@pytest.fixture
def leftovers(begin):
    """A server whose first two processes were killed at once: what is left, and the record."""
    server = begin("has children")
    top = [psutil.Process(pid) for pid in session_members(server.pid)]
    for process in sorted(top, key=lambda process: process.pid)[:2]:
        process.kill()
    assert psutil.wait_procs(top[:2], timeout=120)[1] == []
    (left,) = record.leftovers()
    yield server, psutil.Process(left)
    for process in top:
        with suppress(psutil.Error):
            process.kill()


@pytest.mark.slow
def test_what_a_killed_server_left_is_seen_and_ended_by_down(leftovers):
    server, left = leftovers
    with pytest.raises(
        ServerError, match=f"pid {left.pid} hold.*inv down", check=lambda error: error.code == "server.not-running"
    ):
        record.running()
    assert launch.stop() == server
    assert started_at(left.pid) is None
    with pytest.raises(ServerError, match="started none", check=lambda error: error.code == "server.not-running"):
        launch.stop()


@pytest.mark.slow
def test_what_a_killed_server_left_is_ended_by_the_next_start(leftovers, begin, capsys):
    _, left = leftovers
    with launch.starting():
        assert started_at(left.pid) is None
    assert f"pid {left.pid}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_beside_leftovers_is_not_taken_for_one(leftovers, begin):
    _, left = leftovers
    server = begin()
    assert record.leftovers() == [left.pid]
    assert record.running() == server
    launch.stop()
    assert started_at(left.pid) is None
    assert record.leftovers() == []


def test_a_server_that_was_started_but_not_recorded_is_found(port, tmp_path):
    """As `kill -9` of `./inv up` leaves it between the start and the record."""
    state().mkdir(exist_ok=True)
    code = f"""
import os, pathlib, signal
from sparkforge.serve import launch, record
from sparkforge.serve.plan import StartPlan
record.write = lambda server: os.kill(os.getpid(), signal.SIGKILL)
command = {(sys.executable, misbehaving.__file__, str(port))!r}
launch.start(launch.Launch(command, {{}}, StartPlan("embedded", model_id="m", port={port}), pathlib.Path("x")), print)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert record.read() is None
    left = record.leftovers()
    assert left
    with pytest.raises(ServerError, match=r"\./inv down", check=lambda error: error.code == "server.not-running"):
        record.running()
    assert launch.stop() is None
    assert [pid for pid in left if started_at(pid) is not None] == []


def test_a_path_with_spaces_preloads_by_name(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # importing vLLM's CPU build sets it in this process
    site = tmp_path / "check out ä" / "lib" / "python3.11" / "site-packages"
    for name in ("vllm/libs/libtcmalloc_minimal.so.4", "torch/lib/libgomp.so.1"):
        (site / name).parent.mkdir(parents=True)
        (site / name).write_text("")
    preloaded = embedded.preloaded(tmp_path / "check out ä" / "bin" / "python")
    assert not any(letter.isspace() or letter == "/" for letter in preloaded["LD_PRELOAD"])
    for name in preloaded["LD_PRELOAD"].split(":"):
        assert any((Path(folder) / name).exists() for folder in preloaded["LD_LIBRARY_PATH"].split(":"))
    assert embedded.preloaded(Path(sys.executable)) == {}


def test_a_taken_port_is_named_before_anything_starts(begin, port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ServerError, match=f"--port {port + 1}", check=lambda error: error.code == "server.port"),
    ):
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
    with pytest.raises(
        ServerError,
        match=r"was asked to end .* with exit code 143",
        check=lambda error: error.code == "server.not-running",
    ):
        record.running()
    record.write(record.Server(**{**vars(server), "pid": os.getpid()}))  # the id now belongs to another process
    with pytest.raises(ServerError, check=lambda error: error.code == "server.not-running"):
        record.running()
    record.record_path().write_text("{")
    assert record.read() is None


@pytest.fixture
def recorded():
    """Return a function: the record of a server in a thread of this process."""
    with ExitStack() as stack:

        def recorded(behaviour):
            port = stack.enter_context(misbehaving.answering(behaviour))
            return record.Server(os.getpid(), started_at(os.getpid()), "127.0.0.1", port, "/m", "m", "embedded", "")

        yield recorded


def test_a_stream_that_breaks_off_is_an_error_after_what_came(recorded, capsys):
    with pytest.raises(ServerError, match="DONE", check=lambda error: error.code == "server.reply"):
        conversation.answer_once(recorded("truncates"), "hello", 8)
    assert "Hello" in capsys.readouterr().out


@pytest.mark.parametrize("event", ["{not json", "[1]", '{"choices": 5}', '{"choices": [{"delta": null}]}'])
def test_a_stream_of_another_shape_is_an_error(recorded, event):
    with pytest.raises(ServerError, match="broke off", check=lambda error: error.code == "server.reply"):
        conversation.answer_once(recorded(event), "hello", 8)


def test_the_log_of_the_last_start_is_kept_and_shown(begin, capsys):
    with pytest.raises(ServerError, match="no log", check=lambda error: error.code == "server.not-running"):
        screen.show_log(follow=False)
    with pytest.raises(ServerError, check=lambda error: error.code == "server.start"):
        begin("dies")
    begin()
    screen.show_log(follow=False)
    assert "Starting to load" in capsys.readouterr().out
    assert "no such kernel" in record.log_path().with_name("server.previous.log").read_text()


def test_staying_shows_the_log_and_names_a_server_that_ends_by_itself(begin, monkeypatch):
    server = begin()
    psutil.Process(server.pid).kill()
    with pytest.raises(ServerError, match="by itself", check=lambda error: error.code == "server.start"):
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
    with pytest.raises(InputError, check=lambda error: error.code == "input.model"):
        embedded.Embedded(StartPlan("embedded", model=str(tmp_path)))
    with pytest.raises(UsageError, match="--profile safe"):
        embedded.Embedded(StartPlan("embedded", profile="safe"))


def test_relevant_lines_leave_out_frames_and_fall_back_to_the_last(tmp_path):
    log = tmp_path / "log"
    log.write_text('a\nINFO 11-21 03:40:12 [x.py:1] b\n  File "x.py", line 1\n    ^^^\n')
    assert logs.explain(logs.read(log)) == ["a", "b"]
    log.write_text(
        "ERROR 11-21 03:40:12 [x.py:1] disk: No space left\nERROR 11-21 03:40:13 [x.py:1] disk: No space left\nok\n"
    )
    assert logs.explain(logs.read(log)) == ["disk: No space left"]
    log.write_text(
        "(EngineCore pid=7) ERROR 11-21 03:40:12 [core.py:9] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 11-21 03:40:12 [core.py:9]   File "cpu_attn.py", line 541, in _get_attn_isa\n'
        "(EngineCore pid=7) ERROR 11-21 03:40:12 [core.py:9] NotImplementedError: FP8 KV cache needs AVX-512.\n"
        "WARNING 11-21 03:40:13 [system_utils.py:2] Found ulimit of 1024 and failed to increase with error\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    assert logs.explain(logs.read(log))[0] == "NotImplementedError: FP8 KV cache needs AVX-512."
    assert logs.explain(logs.read(tmp_path / "absent")) == []


ULIMIT = "(APIServer pid=7) WARNING 11-21 03:40:12 [utils.py:1] Found ulimit of 1024; requests may fail with error 24."
UNSUPPORTED = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            "x: error while loading shared libraries: libnuma.so.1",
            ["x: error while loading shared libraries: libnuma.so.1"],
        ),
        (f"{UNSUPPORTED}\n  Value error, not supported", [UNSUPPORTED, "Value error, not supported"]),
        ("INFO 11-21 03:40:12 [x.py:1] b", ["b"]),
    ],
)
def test_a_warning_never_explains_a_failure_and_a_message_is_whole(log, shown):
    assert logs.explain(f"{ULIMIT}\n{log}") == logs.explain(f"{log}\n{ULIMIT}\n") == shown
    assert len(logs.explain(ULIMIT)) == 1  # nothing else is there


STARTING = """
import sys, time
from sparkforge.core import interrupt, paths
from sparkforge.core.files import locked
from sparkforge.serve import hold, launch
waits = sys.argv[1] == "waits"
(paths.state() / launch.LOCK).touch()  # a start that waits has held it
with interrupt.caught(), locked(paths.state() / hold.LOCK, hold.START) if waits else launch.starting():
    try:
        print("starting", flush=True)
        time.sleep(600)
    finally:
        time.sleep(0.3)  # it takes a while to end what was started
        (paths.state() / "ended").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["starts", "waits"])
def test_down_ends_a_start_that_is_under_way_and_waits_for_it(kind, capsys):
    state().mkdir(exist_ok=True)
    command = [sys.executable, "-c", STARTING, kind]
    with subprocess.Popen(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) as start:
        assert start.stdout.readline() == "starting\n"
        try:
            with pytest.raises(ServerError, check=lambda error: error.code == "server.not-running"):
                launch.down()
        finally:
            start.kill()
        assert (state() / "ended").exists(), "down returned before the start had ended what it started"
    assert f"pid {start.pid} is starting a server" in capsys.readouterr().err


def test_down_signals_no_process_that_a_killed_start_named(monkeypatch):
    with launch.starting():
        stale = (state() / launch.LOCK).read_text()
    (state() / launch.LOCK).write_text(stale)  # as SIGKILL leaves it; the id may be another program's by now
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("nobody starts a server"))
    with pytest.raises(ServerError, check=lambda error: error.code == "server.not-running"):
        launch.down()


def test_down_says_who_holds_the_lock_for_something_else(monkeypatch):
    monkeypatch.setattr(launch, "CANCEL_SECONDS", 0.0)
    with (
        locked(state() / launch.LOCK, "do another thing"),
        pytest.raises(StorageError, match="do another thing", check=lambda error: error.code == "storage.busy"),
    ):
        launch.down()
