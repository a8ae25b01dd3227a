"""The GPU's serving benchmark against a stand-in server: what it counts, what it refuses, what makes a check fail."""

import contextlib
import importlib.metadata
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch

from lab.served import random_weights, ranks, serve_gpu, tiny_tokens
from spark_mxfp4.vllm import plugin
from sparkforge.core.errors import ServerError, UsageError


class Server(BaseHTTPRequestHandler):
    """Answers completions as vLLM does; `server.chosen` is the token it likes best, `server.seen` what was asked."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        self.server.now += 1
        self.server.most = max(self.server.most, self.server.now)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if body.get("stream"):
            events = [{"choices": [{"text": ""}]} for _ in range(body["max_tokens"] - 1)]  # two tokens in one event
            events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}})
            lines = [*(f"data: {json.dumps(event)}" for event in events), "data: [DONE]", ""]
            self.wfile.write("\n\n".join(lines).encode())
        else:
            self.wfile.write(json.dumps({"choices": [self.answer(body)]}).encode())
        self.server.now -= 1

    def answer(self, body):
        if "prompt_logprobs" not in body:
            return {"token_ids": [self.server.chosen] * body["max_tokens"]}
        best = str(self.server.chosen)
        return {
            "prompt_logprobs": [
                None,
                *(
                    {best: {"logprob": -1.0}, **({} if str(t) == best else {str(t): {"logprob": -3.0}})}
                    for t in body["prompt"][1:]
                ),
            ]
        }

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server():
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    stub.seen, stub.chosen, stub.now, stub.most = [], 7, 0, 0
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield stub
    stub.shutdown()
    thread.join()
    stub.server_close()


def test_tokens_are_counted_by_the_servers_word_and_requests_kept_in_flight(server):
    row = serve_gpu._load(f"http://127.0.0.1:{server.server_port}", 3, 12, 10, 8)
    assert (row["requests"], row["complete"]) == (12, True)
    assert 12 * 8 / row["output_tokens_per_s"] == pytest.approx(row["seconds"], abs=0.0006)  # rounded to 0.001
    assert len(server.seen) == 12
    assert server.most <= 3
    assert all(len(body["prompt"]) == 10 and body["max_tokens"] == 8 and body["ignore_eos"] for body in server.seen)
    assert len({tuple(body["prompt"]) for body in server.seen}) == 12


@pytest.mark.parametrize(
    ("name", "log", "environment"),
    [
        ("spark", "Using 'SPARK_", {}),
        ("spark:torch", "Using 'SPARK_TORCH'", {"SPARK_MXFP4_KERNEL": "torch"}),
        ("marlin", "Using 'MARLIN", {}),
    ],
)
def test_backends_are_found_by_name(name, log, environment):
    backend = serve_gpu.backend_of(name)
    assert (backend.log, dict(backend.environment)) == (log, environment)


@pytest.mark.parametrize("name", ["cutlass", "triton:torch"])
def test_other_names_are_refused(name):
    with pytest.raises(UsageError, match="there is no backend"):
        serve_gpu.backend_of(name)


def test_a_server_that_took_another_backend_is_refused(tmp_path):
    log = tmp_path / "log"
    log.write_text("INFO Using 'MARLIN' Mxfp4 MoE backend.\n")
    assert serve_gpu._chosen("marlin", log) == "Using 'MARLIN' Mxfp4 MoE backend."
    with pytest.raises(ServerError, match="did not take spark", check=lambda error: error.code == "server.start"):
        serve_gpu._chosen("spark", log)


def test_a_server_that_ends_is_told_with_its_last_error(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_gpu, "backend_of", lambda _: serve_gpu.Backend(("--no-such-argument",), "x"))
    plan = serve_gpu.ServingPlan(10, 8, (1,), 1, 60.0, 1)
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.setattr(serve_gpu.sys, "executable", "/bin/false")
    with pytest.raises(
        ServerError, match="ended before it was ready", check=lambda error: error.code == "server.start"
    ):
        next(serve_gpu.measure("spark", model, plan, tmp_path / "log"))


def test_servers_started_together_are_measured_in_order_and_one_that_ended_costs_only_its_own_row(
    server, tmp_path, monkeypatch
):
    @contextlib.contextmanager
    def started(backend, model, plan, log, weights):
        log.write_text("Using 'MARLIN' Mxfp4 MoE backend." if backend == "marlin" else "")
        order.append(f"start {backend} {plan.port}")
        yield serve_gpu.Started(f"http://127.0.0.1:{server.server_port}", (), time.monotonic(), ranks.Split())

    def ready(started, plan, log):
        order.append(f"wait {log.stem}")
        if log.stem == "spark":
            raise ServerError("the server ended before it was ready", "why", "less", code="server.start")
        return started.url

    order = []
    for name, stand_in in {
        "_started": started,
        "_ready": ready,
        "_machine": dict,
        "run": lambda *_, **__: None,
    }.items():
        monkeypatch.setattr(serve_gpu, name, stand_in)
    out = tmp_path / "out.json"
    arguments = ["--out", str(out), "--work", str(tmp_path), "--backends", "spark", "marlin", "--together"]
    assert (
        serve_gpu.main(
            [*arguments, *["--concurrency", "2", "--long", "--input", "10", "--output", "8", "--rounds", "2"]]
        )
        != 0
    )
    assert order == ["start spark 8123", "start marlin 8124", *["wait spark", "wait marlin"] * 2]
    result = json.loads(out.read_text())["backends"]
    assert "ended before it was ready" in result["spark"]["error"]
    assert [(row["concurrency"], row["requests"]) for row in result["marlin"]["rows"]] == [(2, 4)]


def test_loads_have_their_order_and_those_after_the_limit_are_left_out(tmp_path, monkeypatch):
    def load(_url, concurrency, requests, input_tokens, output_tokens):
        seen.append((concurrency, requests, input_tokens, output_tokens))
        clock[0] += 5
        return {"concurrency": concurrency}

    seen, clock = [], [0.0]
    monkeypatch.setattr(serve_gpu, "_load", load)
    monkeypatch.setattr(serve_gpu, "_ready", lambda started, *_: started.url)
    monkeypatch.setattr(serve_gpu.time, "monotonic", lambda: clock[0])
    log = tmp_path / "log"
    log.write_text("Using 'MARLIN' Mxfp4 MoE backend.")
    started = serve_gpu.Started("http://server", (), 0.0, ranks.Split())
    plan = serve_gpu.ServingPlan(1024, 128, (64, 1), 2, 60.0, 1, long_concurrencies=(64, 4), load_seconds=22)
    rows = list(serve_gpu.measure("marlin", tmp_path, plan, log, started))
    warm_ups = [(64, 128, 1024, 16), (1, 2, 1024, 16)]
    assert seen == [warm_ups[0], (64, 128, 1024, 128), warm_ups[1], (1, 2, 1024, 128), (64, 64, 1024, 1024)]
    assert [row.get("concurrency") for row in rows] == [None, 64, 1, 64, None]
    assert rows[-1] == {
        "left_out": [{"concurrency": 4, "requests": 4, "output_tokens": 1024, "warm_up": False}],
    }


def test_a_sweep_that_the_harness_refuses_is_told_and_ends_nothing(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        plan = serve_gpu.ServingPlan(10, 8, (1,), 1, 1.0, 0, sweep=(1,))
        outcome = serve_gpu._sweep(f"http://127.0.0.1:{taken.getsockname()[1]}", plan, tmp_path / "harness")
    assert outcome.startswith("failed: ")


def client_of(server):
    return httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False)


def test_the_same_server_passes_its_own_record(server):
    with client_of(server) as client:
        recorded = tiny_tokens.record(client, "tiny")
        comparison = tiny_tokens.compare(client, "tiny", recorded)
    assert comparison["passed"]
    assert [row["equal_tokens"] for row in comparison["prompts"]] == [tiny_tokens.GENERATED] * 3


def test_a_server_that_prefers_other_tokens_does_not_pass(server):
    with client_of(server) as client:
        recorded = tiny_tokens.record(client, "tiny")
        server.chosen = 8
        comparison = tiny_tokens.compare(client, "tiny", recorded)
    assert not comparison["passed"]
    assert [row["equal_tokens"] for row in comparison["prompts"]] == [0, 0, 0]
    assert comparison["prompts"][0]["worst_gap"] == pytest.approx(2.0)


def test_random_weights_fill_experts_and_leave_the_rest():
    names = {"e.w13_weight": torch.uint8, "e.w2_weight_scale": torch.uint8, "x_norm.weight": torch.bfloat16,
             "router.weight": torch.bfloat16, "router.bias": torch.bfloat16, "attn": torch.bfloat16}  # fmt: skip
    tensors = {name: torch.full((64, 64), 3).to(dtype) for name, dtype in names.items()}
    random_weights.fill((name, torch.nn.Parameter(t, requires_grad=False)) for name, t in tensors.items())
    assert len(tensors["e.w13_weight"].unique()) == 256
    assert tensors["e.w2_weight_scale"].unique().tolist() == list(range(*random_weights.SCALES))
    assert tensors["router.weight"].float().std() == pytest.approx(random_weights.ROUTER_DEVIATION, rel=0.1)
    assert [tensors[n].unique().tolist() for n in list(names)[2::2]] == [[1.0], [0.0]]
    assert tensors["attn"].unique().tolist() == [3.0]


def test_python_finds_the_load_formats_entry_point(tmp_path):
    random_weights.write_entry_point(tmp_path)
    (package,) = importlib.metadata.distributions(path=[str(tmp_path)])
    plugins = {entry_point.name: entry_point for entry_point in package.entry_points}
    assert {entry_point.group for entry_point in plugins.values()} == {"vllm.general_plugins"}
    assert plugins[random_weights.PLUGIN].load() == random_weights.register
    assert plugins["spark_mxfp4"].load() == plugin.register
