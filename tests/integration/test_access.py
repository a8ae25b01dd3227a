"""A real server with an API key: every route that vLLM has needs it, and our own commands send it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from lab import profile
from sparkforge.bench import settings
from sparkforge.bench.settings import BenchSettings
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.serve import conversation, record, status

pytestmark = pytest.mark.integration
HERE = Path(__file__).parent
CUE = "king"
SCRIPTS = {CUE: "<|channel|>final<|message|>I have a toy and a book, and I read it.<|return|>"}
CLOSED = {"/scale_elastic_ep", "/is_scaling_elastic_ep"}


@pytest.fixture
def served(scripted_server, monkeypatch):
    """The server with an API key; our commands use its state folder."""
    monkeypatch.setenv("SPARKFORGE_STATE", str(scripted_server.work / "state"))
    with httpx.Client(base_url=scripted_server.url, timeout=60, trust_env=False) as api:
        yield SimpleNamespace(**vars(scripted_server), api=api, routes=scripted_server.work / "routes.json")


def requests(served):
    for path, methods in json.loads(served.routes.read_text()):
        for method in methods or ["GET"]:
            yield method, re.sub(r"\{[^}]*\}", "x", path)


def test_every_route_but_health_needs_the_key(served):
    asked = list(requests(served))
    known = {path for _, path in asked}
    assert {"/health", "/metrics", "/invocations", "/tokenize", "/load", "/v1/chat/completions", "/version", "/ping",
            "/generative_scoring", "/scale_elastic_ep", "/v1/models", "/v1/responses/x",
            "/start_profile", "/stop_profile"} <= known  # fmt: skip
    assert not {"/docs", "/redoc", "/openapi.json", "/sleep", "/pause", "/collective_rpc"} & known
    for method, path in asked:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            status = served.api.request(method, path, headers=headers).status_code
            wanted = 404 if path in CLOSED else 200 if path == "/health" else 401
            assert (method, path, status) == (method, path, wanted)


def test_no_process_of_vllm_can_import_from_the_checkouts_root(served):
    """The interpreter of each process is started with that process's environment and folder."""
    leader = psutil.Process(served.server.pid)
    processes = [child for child in (leader, *leader.children(recursive=True)) if "python" in child.exe()]
    assert len(processes) >= 3  # the supervisor, the API server, the engine
    for process in processes[1:]:
        environment = process.environ()
        assert environment["PYTHONSAFEPATH"] == "1"
        path = subprocess.run(
            [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"],
            env=environment, cwd=process.cwd(), capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        assert str(HERE) in path  # the test's own plugin, added above
        assert not {"", str(ROOT)} & {*path}


def test_every_route_takes_the_key(served):
    headers = {"Authorization": f"Bearer {served.key}"}
    for method, path in requests(served):
        reply = served.api.request(method, path, headers=headers)
        assert reply.status_code != 401, (method, path)
        assert "access_error" not in reply.text or path in CLOSED, (method, path)
    assert Endpoint(served.server.url).healthy()


def test_a_foreign_host_is_refused_also_with_the_key(served):
    key = {"Authorization": f"Bearer {served.key}"}
    for host in ("evil.example", f"evil.example:{served.server.port}", "localhost:1"):
        assert served.api.get("/health", headers={"Host": host}).status_code == 403
        assert served.api.get("/v1/models", headers={"Host": host, **key}).status_code == 403
    for host in (f"localhost:{served.server.port}", "spark.example", "spark.example:80"):
        assert served.api.get("/v1/models", headers={"Host": host, **key}).status_code == 200


def test_our_commands_send_the_key_which_is_in_no_argument_record_or_log(served, capsys):
    server = record.running()
    assert (server, server.key) == (served.server, served.key)
    status.show_status(server)
    conversation.Conversation(server, "", 4).ask(CUE)
    assert "healthy · API key required · embedded" in capsys.readouterr().out
    assert settings.endpoint(BenchSettings({}, {})).model == served.model
    assert served.key not in " ".join(psutil.Process(served.server.pid).cmdline())
    for file in ("server.json", "logs/server.log"):
        assert served.key not in (served.work / "state" / file).read_text(errors="replace")


def test_a_server_with_a_profiler_is_profiled(served, tmp_path, capsys):
    port = str(served.server.port)
    profile.run({"port": port, "isl": "16", "osl": "6", "conc": "2", "output": str(tmp_path)})
    folder = Path(capsys.readouterr().out.strip())
    saved = profile.TraceProfile.model_validate_json((folder / "profile.json").read_text())
    assert (folder / saved.trace).stat().st_size > 1000
    assert saved.breakdown.processor == "cpu"
    parts = {group.name: group for group in saved.breakdown.groups}
    assert all(parts[name].ms > 0 for name in ("experts", "attention", "dense", "sampling", "waiting"))
    calls = {row.name: row.calls for row in saved.breakdown.operators}
    layers = json.loads((Path(served.server.model) / "config.json").read_text())["num_hidden_layers"]
    assert calls["vllm::unified_attention_with_output"] >= 6 * layers
