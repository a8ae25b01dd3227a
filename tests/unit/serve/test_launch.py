"""Start and stop, with a small real server instead of vLLM: it has OpenAI's API and behaves or misbehaves."""

import os
import signal
import socket
import subprocess
import sys
from subprocess import PIPE

import misbehaving
import psutil
import pytest
from expected import refused
from servers import recorded

from sparkforge.core import interrupt
from sparkforge.core.errors import ServerError, StorageError, UsageError
from sparkforge.core.files import disk_full, locked
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT, state
from sparkforge.core.process import started_at
from sparkforge.serve import conversation, launch, logs, proof, record, status
from sparkforge.serve.devices import in_environment
from sparkforge.serve.launch import Launch
from sparkforge.serve.record import StartPlan


@pytest.fixture
def port(free_port):
    return free_port()


@pytest.fixture
def begin(port, tmp_path, ended):
    def begin(behaviour="good", timeout=120.0, progress=lambda _text: None):
        state().mkdir(exist_ok=True)
        command = (sys.executable, misbehaving.__file__, str(port), behaviour)
        plan = StartPlan("embedded", model_id="m", port=port)
        return launch.start(Launch(command, {}, plan, tmp_path, timeout), progress)

    begin.ended = ended
    yield begin
    server = record.read()
    if server and server.alive:
        launch.stop()


def nothing_is_left(begin, port):
    assert record.read() is None
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(port) in (p.info["cmdline"] or [])]
    assert all(begin.ended(process.pid) for process in mine)


def test_a_started_server_answers_is_recorded_and_stops(begin, port, capsys):
    notices = []
    server = begin(progress=notices.append)
    assert record.running() == server
    assert server.url == f"http://127.0.0.1:{port}"
    assert notices
    assert logs.milestone(logs.read(record.log_path())) == "loading the model"
    status.show_status(server)
    conversation.Conversation(server, "", 8).ask("hello")
    out = capsys.readouterr().out
    assert "· healthy ·" in out
    assert "hm Hello\n" in out
    assert launch.stop() == server
    nothing_is_left(begin, port)
    with refused("server.not-running", r"\./inv up"):
        launch.stop()


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
    with refused("server.start") as caught:
        begin(behaviour)
    assert message in str(caught.value)
    assert "03:40:13" not in caught.value.why  # vLLM's log prefix says nothing to a user
    assert str(record.log_path()) in caught.value.fix
    nothing_is_left(begin, port)


FORM = ("response_format", {"message": {"role": "assistant", "content": None}, "finish_reason": "length"})
CALL = {"message": {"tool_calls": [{"function": {"name": "get_weather", "arguments": "{"}}]}}
POSITIVE = {"logprobs": {"content": [{"logprob": 0.5, "top_logprobs": []}]}}


@pytest.mark.parametrize(
    ("behaviour", "changes", "message"),
    [
        ("lies", None, "0 tokens instead of 1"),
        ("answers null", None, "TypeError"),
        ("fails at prompt_logprobs", None, "the request for log probabilities of the prompt"),
        ("good", ("logprobs", POSITIVE), "probabilities: the log"),
        ("good", ("prompt_logprobs", {"prompt_logprobs": [None]}), "of the prompt: the log probabilities are []"),
        ("good", ("response_format", {"message": {"content": '{"city": "Oslo"}'}}), "the content does not follow"),
        ("good", FORM, "the request for a JSON answer: content is null (finish_reason 'length')"),
        ("good", ("tools", {"message": {"content": "It rains."}}), "no tool was called; content is 'It rains.'"),
        ("good", ("tools", CALL), "the request for a tool call: the arguments are not JSON"),
    ],
)
def test_an_answer_that_clients_cannot_use_is_named(behaviour, changes, message):
    more = (changes,) if changes else ()
    with misbehaving.answering(behaviour, *more) as port, pytest.raises(ServerError, match="cannot generate") as caught:
        proof.prove(Endpoint(f"http://127.0.0.1:{port}", "m", key=""), 60)
    assert message in caught.value.why


@pytest.mark.slow
def test_another_server_that_takes_the_port_meanwhile_is_not_taken_for_ours(port, tmp_path):
    state().mkdir(exist_ok=True)
    others, endpoint = [], Endpoint(f"http://127.0.0.1:{port}", "m", key="")

    def take(_text):
        if not others:
            others.append(subprocess.Popen([sys.executable, misbehaving.__file__, str(port), "good"]))

    ours = (sys.executable, "-c", "import time; time.sleep(600)")
    plan = StartPlan("embedded", model_id="m", port=port)
    try:
        with refused("server.start", "did not answer in time"):
            launch.start(Launch(ours, {}, plan, tmp_path, 5.0), take)
        assert endpoint.healthy()
    finally:
        others[0].kill()
        others[0].wait()


def test_an_interrupted_start_leaves_nothing(begin, port, monkeypatch):
    def interrupted(_text):
        raise KeyboardInterrupt

    def full(_server):
        raise disk_full(ROOT)

    with pytest.raises(KeyboardInterrupt):
        begin(progress=interrupted)
    nothing_is_left(begin, port)
    monkeypatch.setattr(record, "write", full)
    with refused("storage.full"):
        begin()
    nothing_is_left(begin, port)


def test_a_server_that_was_started_but_not_recorded_is_found(port, tmp_path):
    """`kill -9` of `./inv up` between the start and the record leaves such a server."""
    state().mkdir(exist_ok=True)
    code = f"""
import os, pathlib, signal
from sparkforge.serve import launch, record
from sparkforge.serve.record import StartPlan
record.write = lambda server: os.kill(os.getpid(), signal.SIGKILL)
command = {(sys.executable, misbehaving.__file__, str(port))!r}
launch.start(launch.Launch(command, {{}}, StartPlan("embedded", model_id="m", port={port}), pathlib.Path("x")), print)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert record.read() is None
    left = record.leftovers()
    assert left
    with refused("server.not-running", r"\./inv down"):
        record.running()
    assert launch.stop() is None
    assert [pid for pid in left if started_at(pid) is not None] == []


def test_containers_that_a_killed_fleet_left_are_removed(fake_engine, docker_command, capsys, tmp_path):
    fake_engine.container["State"] = {"Running": True, "Status": "running", "StartedAt": "2026-11-27T10:00:00Z"}
    models = state() / "fleet/models"
    for name, container in (("red", "c0ffee"), ("green", "")):
        (models / name).mkdir(parents=True)
        path = models / name / record.NAME
        path.write_bytes(record.SERVER.dump_json(recorded(container=container, pid=0)))
        path.chmod(0o600)
    models.parent.parent.chmod(0o700)
    docker_command.answers("rm --force c0ffee")
    assert launch.stop() is None
    assert "a killed fleet left red in container c0ffee" in capsys.readouterr().err
    assert [call for call in docker_command.calls if "rm" in call] == ["rm --force c0ffee"]
    with pytest.raises(ServerError, match="no server is running"):
        launch.stop()


def test_a_used_or_invalid_port_is_named_before_anything_starts(begin, port):
    with socket.create_server(("127.0.0.1", port)), refused("server.port", f"--port {port + 1}"):
        begin()
    assert record.read() is None
    for wrong in (0, -1, 65536):
        with pytest.raises(UsageError):
            launch.check_free(wrong)
    record.write(recorded(port))  # a second start
    with refused("server.running") as caught:
        launch.check_free(port, command="./inv qualify")
    assert caught.value.fix == "./inv down && ./inv qualify"
    record.forget()


def test_a_record_of_a_dead_process_or_broken_json_is_no_server(begin):
    server = begin()
    launch.stop()
    record.write(server)
    with pytest.raises(ServerError, match=r"was asked to end .* with exit code 143"):
        record.running()
    record.write(record.Server(**{**vars(server), "pid": os.getpid()}))  # the id now belongs to another process
    with refused("server.not-running"):
        record.running()
    record.record_path().write_text("{")
    assert record.read() is None


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("truncates", "DONE"), *((event, "broke off") for event in ("{not json", '{"choices": [{"delta": null}]}'))],
)
def test_a_stream_that_breaks_off_or_of_another_shape_is_an_error_after_what_came(capsys, behaviour, message):
    with misbehaving.answering(behaviour) as port, refused("server.reply", message):
        conversation.Conversation(recorded(port), "", 8).ask("hello")
    assert "Hello" in capsys.readouterr().out


def test_the_log_of_the_last_start_is_kept_and_shown(begin, capsys):
    with refused("server.not-running", "no log"):
        status.show_log(follow=False)
    with refused("server.start"):
        begin("dies")
    begin()
    status.show_log(follow=False)
    assert "Starting to load" in capsys.readouterr().out
    assert "no such kernel" in record.log_path().with_name("server.previous.log").read_text()


@pytest.mark.parametrize("text", ["{", '{"model_type": "llama"}'])
def test_a_folder_that_is_no_model_is_refused_before_anything_is_set_up(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with refused("input.model"):
        in_environment.Embedded(StartPlan("embedded", model=str(tmp_path)))
    with pytest.raises(UsageError, match="--profile safe"):
        in_environment.Embedded(StartPlan("embedded", profile="safe"))


STARTING = """
import sys, time
from sparkforge.core import interrupt, paths
from sparkforge.core.files import disk_full, locked
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
            with refused("server.not-running"):
                launch.down()
        finally:
            start.kill()
        assert (state() / "ended").exists(), "down returned before the start had ended what it started"
    assert f"pid {start.pid} is starting a server" in capsys.readouterr().err


def test_down_signals_no_process_that_a_killed_start_named_and_says_who_holds_the_lock(monkeypatch):
    with launch.starting():
        stale = (state() / launch.LOCK).read_text()
    (state() / launch.LOCK).write_text(stale)  # as after SIGKILL; the id, here this process's, may be another program's
    with interrupt.caught(), refused("server.not-running"):  # a signal would be a KeyboardInterrupt
        launch.down()
    monkeypatch.setattr(launch, "CANCEL_SECONDS", 0.0)
    with locked(state() / launch.LOCK, "do another thing"), pytest.raises(StorageError, match="do another thing"):
        launch.down()


def test_staying_names_a_server_that_ends_by_itself_and_ctrl_c_stops_it(begin, port, monkeypatch):
    server = begin()
    psutil.Process(server.pid).kill()
    with refused("server.start", "by itself"):
        status.stay(server)
    assert record.read() is None
    server = begin()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "follow", interrupted)
    status.stay(server)
    nothing_is_left(begin, port)
