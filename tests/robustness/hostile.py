"""Hostile requests against a live server, while a bystander sends normal requests.

    PYTHONPATH=tests python -m robustness.hostile server [--seconds 900] [--json FILE]

The program starts the embedded server on loopback and a bystander that sends requests continuously. It sends every
attack of ATTACKS, first one after another, then eight at once, then CROWD long prompts at once; their clients
disconnect after PATIENCE seconds. Then it cuts streams half-way, repeats requests and sends those of `hostile_texts`.
It checks running requests, CPU time and memory.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import httpx
import psutil

from robustness import hostile_texts
from robustness.hostile_texts import CHAT, chat, completion, messages, responses
from sparkforge.core import paths
from sparkforge.core.openai import Endpoint, wait_until
from sparkforge.core.process import spawn, started_at, terminate_session
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan
from sparkforge.serve.settings import TINY_ID

US, THEM = "127.0.0.2", "127.0.0.1"  # the bystander's address, and the attackers', which uvicorn's default believes
CLAIMED = itertools.cycle(range(1, 255))  # last numbers of the addresses that requests say they come from
PATIENCE = 5.0  # seconds after which an attacker disconnects
WORST = 2.0  # seconds that the bystander may wait above the baseline
IDLE_AFTER, IDLE = 10.0, 0.25  # seconds after the last attacker left, and cores that may then be busy
GROWTH, BUSY_SECONDS = 1.05, 2.0
STREAMS, REPEATS, TEXTS = 300, 2000, 1000
CROWD = 40  # more requests than the server has slots
START_SECONDS = 600.0
WARM_UP = 6  # answers before the baseline: the first JSON starts the process that compiles grammars
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}}, "required": ["name"]}


def schema(value, **more):
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}}, **more)


def structured(**value):
    return chat(structured_outputs=value)


def objects(count, value=None, required=0):
    """Return the schema of an object with the given number of properties."""
    names = [f"p{i}" for i in range(count)]
    properties = {name: value or {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names[:required]}


def nested(depth, wrap, inner):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def tool(parameters, name="f", **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


BRANCHES = nested(
    14, lambda inner: {"anyOf": [inner, {"type": "object", "properties": {"a": inner}}]}, {"type": "string"}
)
WORDS = [f"value number {i}" for i in range(100_000)]
# Name → path and body. A body in bytes is sent unchanged.
ATTACKS = {
    "enum of 20,000": schema({"enum": WORDS[:20_000]}),
    "3,000 optional properties": schema(objects(3000)),
    "512 required properties": schema(objects(512, required=512)),
    "objects of 100 optional objects": schema(objects(100, objects(100))),
    "anyOf, doubled 14 times": schema(BRANCHES),
    "oneOf nested 30 times": schema(nested(30, lambda inner: {"oneOf": [inner, {"type": "null"}]}, {"type": "string"})),
    "arrays nested 200 times": schema(nested(200, lambda inner: {"type": "array", "items": inner}, {})),
    "minItems of a million": schema({"type": "array", "minItems": 1_000_000, "items": {"type": "string"}}),
    "maxLength of a billion": schema({"type": "string", "maxLength": 10**9}),
    "$ref to itself": schema({"$ref": "#"}),
    "$ref in a circle": schema({"$defs": {n: {"$ref": f"#/$defs/{m}"} for n, m in ("ab", "ba")}, "$ref": "#/$defs/a"}),
    "500 definitions that refer to all": schema(
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(30)]} for i in range(30)},
         "$ref": "#/$defs/d0"}),
    "pattern with nested bounds": schema({"type": "string", "pattern": "^((a{1,50}){1,50}){1,50}$"}),
    "pattern with look-ahead bounds": schema({"type": "string", "pattern": "^(.*a){20}.{500}$", "maxLength": 900}),
    "multipleOf with 2,000 values": schema({"anyOf": [{"type": "number", "multipleOf": i + 1} for i in range(1900)]}),
    "patternProperties": schema({"type": "object", "patternProperties": {f"^{i}.*{i}$": objects(9) for i in range(9)}}),
    "schema of 5 MB": schema({"description": "x" * 5_000_000}),
    "regex with nested bounds": structured(regex="((a{1,50}){1,50}){1,50}"),
    "regex of states": structured(regex="(.*a){20}.{500}"),
    "regex of classes": structured(regex="([a-z]*[0-9]*){100}x"),
    "100,000 choices": structured(choice=WORDS),
    "left-recursive grammar": structured(grammar='root ::= root root root | root root | "a" | ""'),
    "grammar of 2,000 rules": structured(
        grammar="\n".join([f'r{i} ::= r{i + 1} | "a{i}" r{(i * 7) % 2000}' for i in range(2000)] +
                          ['r2000 ::= "z"', "root ::= r0"])),
    "grammar of bounds": structured(grammar='root ::= (("a"{1,500}){1,500}){1,500}'),
    "Lark grammar": structured(grammar='start: start start | "a" | start "b"*'),
    "structural tag of a large schema": structured(structural_tag=json.dumps(
        {"structures": [{"begin": "<a>", "schema": objects(3000), "end": "</a>"}], "triggers": ["<a>"]})),
    "required tool with a large schema": chat(tools=[tool(objects(500))], tool_choice="required"),
    "strict tools": chat(tools=[tool(objects(100), f"f{i}", strict=True) for i in range(50)], tool_choice="required"),
    "10,000 tools": chat(tools=[tool({}, f"f{i}") for i in range(10_000)]),
    "Responses: large format": responses(
        text={"format": {"type": "json_schema", "name": "x", "schema": objects(3000)}}),
    "Responses: 10,000 items": responses(input=[{"role": "user", "content": "x"}] * 10_000),
    "Messages: large tools": messages(tools=[{"name": f"f{i}", "input_schema": objects(400)} for i in range(40)]),
    "Messages: 5,000 stop sequences": messages(stop_sequences=WORDS[:5000]),
    "n of 10,000": completion(n=10_000),
    "a batch of 300 conversations": (
        f"{CHAT}/batch", {**chat(max_tokens=50)[1], "messages": [chat()[1]["messages"]] * 300}),
    "500 items to score": (
        "/generative_scoring", {"query": "a", "items": ["b " * 500] * 500, "label_token_ids": [1, 2]}),
    "300 questions": ("/v1/systemone", {"state": "x", "questions": {str(i): {"type": "yes_no"} for i in range(300)}}),
    "best_of of 10,000": completion(best_of=10_000),
    "64 answers of 4,000 tokens": completion(n=64, max_tokens=4000, ignore_eos=True),
    "8 answers of 4,000 tokens": completion(n=8, max_tokens=4000, ignore_eos=True),
    "8 prompts of 3,000 tokens": completion(prompt=[[1000 + i] * 3000 for i in range(8)]),
    "5,000 prompts": completion(prompt=WORDS[:5000]),
    "50,000 stop strings": completion(stop=WORDS[:50_000]),
    "a stop string of 1 MB": completion(stop="x" * 1_000_000),
    "logit_bias of 200,000": completion(logit_bias={str(i): 1 for i in range(200_000)}),
    "scores of 4,000 tokens": completion(prompt=[1000] * 4000, max_tokens=1, echo=True, logprobs=2),
    "20 scores of 4,000 tokens": completion(prompt=[1000] * 4000, max_tokens=1, echo=True, logprobs=20),
    "scores of 8 prompts": completion(prompt=[[1000 + i] * 500 for i in range(8)], max_tokens=1, prompt_logprobs=1),
    "logprobs of 200,000": completion(logprobs=200_000),
    "allowed_token_ids of 200,000": completion(allowed_token_ids=list(range(200_000))),
    "max_tokens of 1e30": completion(max_tokens=1e30),
    "50,000 bad words": completion(bad_words=WORDS[:50_000]),
    "an image to fetch": chat(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}]),
    "tokens of 10 MB": ("/tokenize", {"model": TINY_ID, "prompt": "x y " * 2_500_000}),
    "a chat of 4 MB": chat(messages=[{"role": "user", "content": "x y " * 1_000_000}]),
    "a prompt of 40 MB": completion(prompt="x" * 40_000_000),
    "a million tokens": completion(prompt=[1] * 1_000_000),
    "20,000 messages": chat(messages=hostile_texts.user() * 20_000),
    "JSON nested 100,000 times": (CHAT, b"[" * 100_000),
    "numbers of 100,000 digits": (CHAT, b'{"n": ' + b"9" * 100_000 + b"}"),
}  # fmt: skip


def raw(port, data, *, slow=b""):
    """Send bytes, then `slow` bytes one per second; return the status line, or how the connection ended."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE, source_address=(THEM, 0)) as connection:
        try:
            connection.sendall(data)
            for letter in slow:
                connection.sendall(bytes([letter]))
                time.sleep(1)
            return connection.recv(64).decode("latin-1").partition("\r")[0] or "closed"
        except TimeoutError:
            return "left"


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:%d\r\nContent-Type: application/json\r\n"
RAW = {
    "Upgrade: websocket": lambda port: raw(
        port, HEAD % port + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n{}"),
    "a body that never ends": lambda port: raw(port, HEAD % port + b"Content-Length: 9\r\n\r\n", slow=b"     "),
    "headers that never end": lambda port: raw(port, HEAD % port, slow=b"X-A: "),
    "a connection without a request": lambda port: raw(port, b""),
    "a header of 1 MB": lambda port: raw(port, HEAD % port + b"X-A: " + b"x" * 1_000_000 + b"\r\n\r\n"),
    "a length of 1e18": lambda port: raw(port, HEAD % port + b"Content-Length: 999999999999999999\r\n\r\n{}"),
    "a response that nobody reads": lambda port: raw(port, HEAD % port + b"Content-Length: %d\r\n\r\n%b" % (
        len(body := json.dumps(chat(stream=True, max_tokens=1000)[1]).encode()), body)),
}  # fmt: skip


class Bystander:
    """A process that continuously requests plain text and JSON in turn, and reports how long each answer took.

    It is a separate process, because attackers hold their interpreter's lock while they write their bodies.
    """

    def __init__(self, url):
        context = multiprocessing.get_context("fork")
        self._waits, self._ended = context.SimpleQueue(), context.Event()
        self._begun, self._failed = context.Value("d", time.monotonic()), context.Value("i", 0)
        self.answers = 0
        self._process = context.Process(target=self._ask, args=(url,), daemon=True)
        self._process.start()

    def _ask(self, url):
        bodies = (chat()[1], schema(PERSON, max_tokens=12)[1])
        with httpx.Client(transport=httpx.HTTPTransport(local_address=US), timeout=180, trust_env=False) as session:
            while not self._ended.is_set():
                for body in bodies:
                    begun = self._begun.value = time.monotonic()
                    status = 0
                    with suppress(httpx.HTTPError):
                        status = session.post(f"{url}{CHAT}", json=body).status_code
                    self._failed.value += status != 200
                    self._waits.put(time.monotonic() - begun)
                time.sleep(0.1)

    def worst(self):
        """Return the longest wait since the last call, including the running request."""
        waits = [time.monotonic() - self._begun.value, 0.0]
        while not self._waits.empty():
            waits.append(self._waits.get())
            self.answers += 1
        return max(waits)

    def alive(self):
        return self._process.is_alive()

    def end(self):
        """Stop, and return how many requests were refused or not answered."""
        self._ended.set()
        self.worst()  # a full pipe would block the process
        self._process.join()
        return self._failed.value


def attack(url, port, name):
    """Send one attack as a client that disconnects after PATIENCE seconds; return the status, or `left`."""
    if name in RAW:
        with suppress(OSError):
            return RAW[name](port)
        return "closed"
    return send(url, ATTACKS[name][0], content(name))


@cache
def content(name):
    """Return the encoded body of an attack, cached because encoding large bodies takes more CPU than refusing them."""
    body = ATTACKS[name][1]
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def send(url, path, body):
    """Send a request as a client that disconnects after PATIENCE seconds; return the status, or `left`.

    Each request says that it comes from another address.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    transport = httpx.HTTPTransport(local_address=THEM)
    headers = {"content-type": "application/json; a=multipart/b", "x-forwarded-for": f"10.0.0.{next(CLAIMED)}"}
    try:
        with httpx.Client(transport=transport, timeout=PATIENCE, trust_env=False) as session:
            return str(session.post(f"{url}{path}", content=content, headers=headers).status_code)
    except httpx.TimeoutException:
        return "left"
    except httpx.HTTPError as error:
        return type(error).__name__


def crowd(url, bystander):
    """Send CROWD long prompts at once, which share no prefix, then as many responses in the background.

    Returns the bystander's longest wait.
    """
    prompts = [completion(prompt=[1000 + i] * 3900, max_tokens=100, ignore_eos=True) for i in range(CROWD)]
    for requests in (prompts, [responses(background=True, max_output_tokens=400) for _ in range(CROWD)]):
        with ThreadPoolExecutor(CROWD) as pool:
            list(pool.map(lambda request: send(url, *request), requests))
    return bystander.worst()


def cut_stream(url):
    """Begin a streamed answer, and disconnect after its first event."""
    body = chat(stream=True, max_tokens=1000)[1]
    transport = httpx.HTTPTransport(local_address=THEM)
    with suppress(httpx.HTTPError), httpx.Client(transport=transport, timeout=60, trust_env=False) as session:  # noqa: SIM117
        with session.stream("POST", f"{url}{CHAT}", json=body) as response:
            next(response.iter_lines(), None)


def running(url):
    """Return the engine's number of running and waiting requests, from its metrics."""
    text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(names))


def members(pid):
    """Return a process and all its descendants."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def busy_cores(pid):
    """Return how many cores a process and its descendants keep busy."""
    before = [sum(process.cpu_times()[:2]) for process in members(pid)]
    time.sleep(BUSY_SECONDS)
    return (sum(sum(process.cpu_times()[:2]) for process in members(pid)) - sum(before)) / BUSY_SECONDS


@contextmanager
def server():
    """Start the embedded server; yield its URL, its port and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = Path(sys.executable)
    described = in_environment.Embedded(
        StartPlan(EMBEDDED, port=port), python, in_environment.write_tiny(python)
    ).launch()
    log, url = Path(tempfile.mkdtemp(prefix="sparkforge-hostile-")) / "server.log", f"http://127.0.0.1:{port}"
    environment = {**os.environ, **described.environment, "PYTHONPATH": str(paths.ROOT)}
    pid = spawn(described.command, log=log, env=environment, cwd=paths.ROOT)
    try:
        if not wait_until(Endpoint(url).healthy, time.monotonic() + START_SECONDS, lambda: started_at(pid) is not None):
            raise RuntimeError(f"the server does not start: {log}\n{log.read_text(errors='replace')[-3000:]}")
        yield url, port, pid
    finally:
        terminate_session(pid)


def campaign(seconds, repeats, streams, seed):
    """Attack a server; return the counts, with descriptions in `failures`."""
    begun, failures, rows = time.monotonic(), [], []
    with server() as (url, port, pid):
        deadline = time.monotonic() + seconds

        def check(name, ok, why):
            sys.stderr.write(f"  {'✓' if ok else '✗'} {name}: {why}\n")
            failures.extend([] if ok else [f"{name}: {why}"])

        bystander = Bystander(url)
        while bystander.answers < WARM_UP and bystander.alive():
            time.sleep(0.5)
            bystander.worst()
        bystander.worst()
        time.sleep(15)
        baseline = bystander.worst()
        names = [*ATTACKS, *RAW]
        for name in names:
            if time.monotonic() > deadline:
                break
            ended = attack(url, port, name)
            rows.append({"attack": name, "ended": ended, "wait": round(bystander.worst(), 2)})
            sys.stderr.write(f"  {name:40} {ended:24} {rows[-1]['wait']:6.2f} s\n")
        check("attacks", len(rows) == len(names), f"{len(rows)} of {len(names)} were sent")
        check("one after another", (worst := max(row["wait"] for row in rows)) <= baseline + WORST,
              f"the bystander's worst wait {worst:.2f} s, baseline {baseline:.2f} s")  # fmt: skip
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: attack(url, port, name), names))
        together = bystander.worst()
        check("eight at once", together <= baseline + WORST, f"the bystander's worst wait {together:.2f} s")
        crowded = crowd(url, bystander)
        check("a crowd", crowded <= baseline + WORST, f"the bystander's worst wait {crowded:.2f} s")
        check("bystander", not (refused := bystander.end()), f"{refused} of its requests were refused")
        time.sleep(IDLE_AFTER)
        busy = busy_cores(pid)
        check("idle", busy <= IDLE, f"{busy:.2f} cores busy {IDLE_AFTER:g} s after the last client left")
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: cut_stream(url), range(streams)))
        time.sleep(IDLE_AFTER)
        check("streams", not (left := running(url)), f"{left:g} requests run after {streams} streams were cut")
        cheap = [name for name in ATTACKS if len(content(name)) < 20_000]
        sizes = []
        with ThreadPoolExecutor(8) as pool:
            for number in (repeats // 4, repeats):
                list(pool.map(lambda i: attack(url, port, cheap[i % len(cheap)]), range(number)))
                time.sleep(IDLE_AFTER)
                sizes.append(sum(process.memory_full_info().pss for process in members(pid)))
        check("memory", sizes[1] <= GROWTH * sizes[0],
              f"{sizes[0] >> 20} MiB, {sizes[1] >> 20} MiB after {repeats} more requests")  # fmt: skip
        texts = list(hostile_texts.requests(seed, TEXTS))
        with ThreadPoolExecutor(4) as pool:
            ends = list(pool.map(lambda text: send(url, *text), texts))
        broken = [text for text, end in zip(texts, ends, strict=True) if not end.isdecimal() or end >= "500"]
        why = f"{len(broken)} of {TEXTS} odd requests of seed {seed} got no answer or 5xx"
        check("texts", not broken, f"{why}: {json.dumps(broken[0])[:500]}" if broken else why)
        check("health", Endpoint(url).healthy(), "the server answers /health")
    return {
        "scenario": "server", "attacks": len(rows), "baseline": round(baseline, 2), "worst": worst,
        "together": round(together, 2), "crowded": round(crowded, 2), "busy_cores": round(busy, 2),
        "unsound": len(failures), "failures": failures, "rows": rows, "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def main(arguments=None):
    """Run from the command line; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=["server"])
    parser.add_argument("--seconds", type=float, default=900.0, help="for the attacks one after another")
    parser.add_argument("--seed", type=int, default=0, help="of the texts; the attacks are a table")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    row = campaign(options.seconds, options.repeats, options.streams, options.seed)
    sys.stdout.write(f"{len(row['failures'])} failures in {row['seconds']:.0f} s\n")
    if options.json:
        options.json.write_text(json.dumps(row) + "\n")
    return 1 if row["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
