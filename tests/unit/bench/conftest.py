"""A stub OpenAI server on loopback that answers correctly, or wrongly in one named way (`lie`)."""

import json
import random
import socket
import threading
import time
from collections import Counter

import pytest
from loopback import Quiet, serving

from sparkforge import pins
from sparkforge.bench import baselines, gate
from sparkforge.bench.gate import Passage
from sparkforge.bench.load import FinishedLoad, Sample, check_load, compute_metrics
from sparkforge.bench.runs import Bench
from sparkforge.bench.schema import Config, Result
from sparkforge.core.openai import Endpoint

MODEL = "honest-model"
TEXT = "It is a truth universally acknowledged. " * 20
PASSAGE = Passage("persuasion-24", TEXT)


class Stub:
    def __init__(self):
        self.model, self.lie, self.status, self.fail_from = MODEL, "", 0, 0
        self.logprob, self.content, self.first = -0.5, "Paris.", "<|channel|>"
        self.tool_arguments, self.tool_name = '{"city": "Paris"}', "get_weather"
        self.tokenizes, self.counts = True, True
        self.asked, self.bodies, self.generated = Counter(), [], 0
        self.streams, self.hold_from = 0, 10**9  # streams from this number on wait until released
        self.at_load = None  # called once, at the first streamed answer
        self.acts = {}  # path → function that is called with the body of a successful POST there
        self.gone = threading.Event()
        self.lock = threading.Lock()
        self.posted, self.post_answers, self.board_answer = [], [], b""


class Handler(Quiet):
    protocol_version = "HTTP/1.1"

    def get(self):
        stub = self.server.stub
        if self.path == "/v1/models":
            self.json({"data": [{"id": stub.model, "max_model_len": 4096}]})
        elif self.path == "/version":
            self.json({"version": "0.0-stub"})
        elif self.path == "/metrics" and stub.counts:
            body = f'vllm:generation_tokens_total{{engine="0"}} {float(stub.generated)}\n'
            self.reply(200, body.encode())
        elif self.path.startswith("/gradio_api/call/submit_results/"):
            state = "error" if stub.lie == "gradio error" else "complete"
            self.reply(200, f"event: {state}\ndata: []\n\n".encode(), {"Content-Type": "text/event-stream"})
        else:
            self.json({"error": "no such path"}, 404)

    def post(self):
        stub, body = self.server.stub, json.loads(self.body())
        with stub.lock:
            stub.asked[self.path] += 1
            stub.bodies.append((self.path, body, dict(self.headers)))
            number = stub.asked[self.path]
        if self.path == "/tokenize":
            return self.json({"tokens": list(body["prompt"].encode())}) if stub.tokenizes else self.json({}, 404)
        if self.path == "/v1/chat/completions":
            return self.chat(body)
        if self.path == "/v1/completions":
            if stub.status and number > stub.fail_from:
                return self.json({"error": {"message": "told to"}}, stub.status)
            return self.stream(body) if body.get("stream") else self.complete(body)
        return self.take(body)

    def take(self, body):
        """Answer like a leaderboard: first with the prepared answers, then with success."""
        stub = self.server.stub
        status = stub.post_answers.pop(0) if stub.post_answers else 200
        if status == "drop":
            self.close_connection = True
            self.connection.close()
            return
        if status == 200:
            stub.posted.append(body)
            stub.acts.get(self.path, lambda _body: None)(body)
        if stub.board_answer:
            self.reply(status, stub.board_answer)
        else:
            self.json({"event_id": "1"} if "gradio" in self.path else {"ok": True}, status)

    def complete(self, body):
        stub = self.server.stub
        prompt = body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split()
        if not body.get("echo"):
            usage = {"prompt_tokens": len(prompt) + 2, "completion_tokens": 1}
            return self.json({"choices": [{"text": stub.first}], "usage": usage})
        scores = [None] + [stub.logprob] * (len(prompt) - 1) + [-0.1]
        scores[3] = {"NaN logprobs": float("nan"), "positive logprobs": 0.5}.get(stub.lie, scores[3])
        if stub.lie == "fewer logprobs":
            del scores[1:4]
        choice = {"text": "", "logprobs": None if stub.lie == "no logprobs" else {"token_logprobs": scores}}
        return self.json({"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1}})

    def chat(self, body):
        stub = self.server.stub
        message = {"role": "assistant", "content": stub.content}
        if body.get("tools"):
            message["tool_calls"] = [{"function": {"name": stub.tool_name, "arguments": stub.tool_arguments}}]
        choices = [] if stub.lie == "no choices" else [{"message": message, "finish_reason": "stop"}]
        self.json({"choices": choices, "usage": {"completion_tokens": 3}})

    def stream(self, body):
        self.act()
        stub, wanted = self.server.stub, body["max_tokens"]
        with stub.lock:
            stub.streams += 1
        while stub.streams > stub.hold_from and not stub.gone.is_set():
            time.sleep(0.005)
        Quiet.stream(self, {"Connection": "close"})
        self.close_connection = True
        if stub.lie == "silent":
            stub.gone.wait(30)
            return
        if stub.lie == "only pings":
            while not stub.gone.is_set() and self.write(": ping\n\n"):
                time.sleep(0.01)
            return
        pieces = {"no tokens": 0, "truncated": wanted // 2, "bundled": 1, "endless": 10**9}.get(stub.lie, wanted)
        for _ in range(pieces):
            if not self.event({"choices": [{"text": "x"}]}):
                return
        if stub.lie == "truncated":
            return
        if stub.lie == "an error in the stream":
            self.event({"error": {"message": "engine died"}})
            return
        if stub.lie == "no JSON":
            self.write("data: <html>\n\n")
            return
        counted = {"too many counted": wanted * 40, "too few counted": 1}.get(stub.lie, wanted)
        with stub.lock:
            stub.generated += 0 if stub.lie == "its counter stands still" else counted
        sent = 3 if stub.lie == "prompts cut" else len(body["prompt"])
        usage = None if stub.lie == "no usage" else {"prompt_tokens": sent, "completion_tokens": counted}
        self.event({"choices": [], "usage": usage})
        self.write("data: [DONE]\n\n")

    def act(self):
        stub = self.server.stub
        with stub.lock:
            act, stub.at_load = stub.at_load, None
        if act:
            act()
        if stub.lie == "hangs up":
            self.connection.shutdown(socket.SHUT_RDWR)

    def event(self, value):
        return self.write(f"data: {json.dumps(value)}\n\n")

    def write(self, text):
        try:
            self.wfile.write(text.encode())
            self.wfile.flush()
        except OSError:
            return False
        return True

    def json(self, value, status=200):
        self.reply(status, value)


@pytest.fixture
def stub():
    behaviour = Stub()
    with serving(Handler, stub=behaviour) as server:
        behaviour.url = server.url
        yield behaviour
        behaviour.gone.set()


@pytest.fixture
def endpoint(stub):
    return Endpoint(stub.url, MODEL, read_seconds=60.0)


@pytest.fixture(scope="session")
def table():
    return baselines.load()


@pytest.fixture
def config(stub):
    shape = {"tp": 1, "isl": 24, "osl": 8, "conc": 2, "max_model_len": 4096, "random_range_ratio": 0.0}
    return Config(model=MODEL, url=stub.url, num_prompts=6, warmups=1, **shape)


@pytest.fixture
def passage():
    return PASSAGE


@pytest.fixture
def bench(stub, endpoint, table):
    """A `Bench` whose gate has passed, with long timeouts for busy machines."""
    verdict = gate.run(endpoint, table, PASSAGE)
    stub.asked.clear()
    stub.bodies.clear()
    return Bench(endpoint, 60.0, table, verdict, TEXT)


@pytest.fixture
def make_result(table):
    def make(speed=1.0, seed=0, conc=4, isl=1024, osl=1024, count=40, team_model="gpt-oss-120b", **changes):
        rng = random.Random(seed)  # noqa: S311 (noise of a test)
        lengths = {"isl": isl, "osl": osl, "conc": conc, "max_model_len": 16384, "random_range_ratio": 0.0}
        shape = Config(model=team_model, url="http://127.0.0.1:8000", tp=1, num_prompts=count, warmups=0, **lengths)
        samples = []
        for number in range(count):
            ttft, step = 0.2 * rng.uniform(0.9, 1.1) / speed, 0.01 * rng.uniform(0.95, 1.05) / speed
            gaps = [step] * (osl - 1)
            samples.append(Sample(number * 0.1, ttft, ttft + sum(gaps), gaps, osl, isl, osl, osl))
        load = FinishedLoad(samples, sum(s.latency for s in samples) / conc)
        figures = compute_metrics(load, shape)
        values = {
            "passed": True,
            "config": shape,
            "gate": {
                "passed": True,
                "checks": [{"name": "bits_per_byte", "ok": True, "told": "2.06 ≤ 2.12", "value": 2.06, "limit": 2.12}],
                "text": "wikitext-2-raw-test", "chunked_by": "tokens", "bits_per_byte": 2.06, "byte_perplexity": 4.17,
                "word_perplexity": 223.0, "tokens": 1000, "seconds": 1.0, "sanity_only": False, "source": "a test",
            },
            "checks": check_load(load, shape),
            "metrics": figures,
            "ratios": baselines.compute_ratios(figures, (isl, osl, conc), table.figures),
            "requests": [sample.row() for sample in samples],
            "client": {"name": "sparkforge", "version": "0"},
            "server": {"model": team_model, "device": "a test's"},
            "machine": {"processor": "none", "measured_at": "2026-11-21T00:00:00+00:00"},
            "seconds": 1.0,
        }  # fmt: skip
        return Result.model_validate({**values, **changes})

    return make


@pytest.fixture
def board_result(make_result, table):
    """Return a maker of results that the competition's boards accept; `gate` replaces fields of the gate."""
    text = pins.load().texts[table.competition.text]
    limits = table.competition.at_most
    figures = {"bits_per_byte": 2.06, "byte_perplexity": 4.17, "word_perplexity": 223.0}
    checks = [gate.bounded(name, figures[name], limit, upper=True) for name, limit in limits.items()]
    sha256 = text.pinned_files[text.member].sha256

    def make(gate=None, **changes):
        result = make_result(**changes)
        own = {"checks": checks, "text_sha256": sha256, **(gate or {})}
        return result.model_copy(update={"gate": result.gate.model_copy(update=own)})

    return make
