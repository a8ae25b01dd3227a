"""Bounds of a request, at the ASGI level: requests that pass, refusals with the bound's name, requests left to vLLM."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from sparkforge.serve import access, limits

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
USUAL = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


def test_threads_that_parse_give_way_to_the_event_loop_soon():
    sys.setswitchinterval(0.005)  # Python's default
    limits.Limiter(None, {})
    assert sys.getswitchinterval() == pytest.approx(0.0005)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def properties(count, **more):
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}, **more}


PASSING = {
    "a chat": USUAL,
    "agents' schemas": schema(properties(60, required=["p1"], additionalProperties=False)),
    "tools": {"tools": [{"type": "function", "function": {"parameters": properties(20)}} for _ in range(64)]},
    "a prompt of tokens": {"prompt": list(range(100_000))},
    "scores": {"prompt": [1] * 4096, "echo": True, "logprobs": 3},
    "no scores": {"prompt": [1] * 4097, "echo": True, "prompt_logprobs": None},
    "an image": {"messages": [{"content": [{"image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}]}]},
    "odd text": {"prompt": "🦜\\ud800\0\uffff"},
    "a regex": {"structured_outputs": {"regex": r"\d{1,4}-[a{9999}]\{9999\}(ab{20}){1,20}"}},
    "odd types": {"n": "many", "stop": 7, "logit_bias": [], "tools": "x", "response_format": 3, "prompt": [[]]},
    "a property called pattern": schema({"properties": {n: {} for n in ("pattern", "enum", "grammar")}}),
    "not a number": {"n": float("nan"), "max_tokens": 1e30},
}  # fmt: skip
REFUSED = {
    "sequences": [{"best_of": 9}, {"prompt": ["a"] * 5, "n": 2}, {"n": 1e30}, {"n": "10000"}],
    "sequence-tokens": [
        {"n": 8, "max_tokens": 131_072}, {"prompt": [[1]] * 6, "max_tokens": 1e30},
        {"messages": [[{"content": "a"}]] * 4, "max_tokens": 131_072},
    ],
    "prompts": [
        {"prompt": ["a"] * 9}, {"prompt": [[1]] * 9}, {"messages": [[{"content": "a"}]] * 9},
        {"query": "a", "items": ["b"] * 9}, {"questions": {str(i): {} for i in range(9)}},
    ],
    "prompts-text": [
        {"prompt": ["a" * 32_768, "b"]}, {"prompt": [[1] * 8192, [1]]}, {"messages": [[{"content": "a" * 20_000}]] * 2},
        {"items": [[1] * 5000] * 2},
    ],
    "text": [{"prompt": "x" * 1_572_865}, {"messages": [{"content": [{"text": "é" * 400_000}] * 4}]}],
    "messages": [{"messages": [{}] * 5000}, {"input": [{}] * 5000}],
    "stop": [{"stop": ["x"] * 33}, {"stop_token_ids": list(range(33))}, {"stop_sequences": ["x"] * 33}],
    "stop-length": [{"stop": "x" * 257}, {"bad_words": ["x" * 257]}],
    "logit-bias": [{"logit_bias": {str(i): 1 for i in range(1025)}}],
    "bad-words": [{"bad_words": ["x"] * 257}],
    "logprobs": [{"top_logprobs": 21}, {"logprobs": 10_000}, {"prompt_logprobs": 21}],
    "scored-tokens": [
        *({"prompt": [1] * 4097, **scored} for scored in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 0})),
        {"prompt": [[1] * 2049] * 2, "prompt_logprobs": 1}, {"prompt": "é" * 8194, "prompt_logprobs": -1},
        {"messages": [{"content": "x" * 8194}], "echo": True},
    ],
    "scores": [{"prompt": [1] * 4000, "echo": True, "logprobs": 4}, {"prompt": [1] * 800, "prompt_logprobs": 20}],
    "tools": [{"tools": [{}] * 257}],
    "schema-bytes": [{"tools": [{"description": "x" * 600_000}]}],
    "schema-depth": [
        schema(nested(50)), {"tools": [nested(50)]}, {"structured_outputs": {"json": json.dumps(nested(50))}},
    ],
    "schema-values": [schema({str(i): [1] * 1000 for i in range(21)})],
    "schema-properties": [schema(properties(513)), {"tools": [{"parameters": properties(513)}]}],
    "schema-optional": [schema(properties(129)), {"text": {"format": {"schema": properties(200)}}}],
    "enum": [
        schema({"enum": list(range(2001))}), schema({"anyOf": [{}] * 2001}),
        {"structured_outputs": {"choice": ["x"] * 2001}},
        {"structured_outputs": {"structural_tag": json.dumps({"format": {"enum": list(range(2001))}})}},
        {"output_config": {"format": {"schema": {"enum": list(range(2001))}}}},
    ],
    "regex-length": [{"structured_outputs": {"regex": "a" * 1025}}, schema({"pattern": "a" * 1025})],
    "regex-repeats": [schema({"pattern": r"((a{1,50}){1,50}){1,50}"}), {"structured_outputs": {"regex": "a{9999999}"}}],
    "grammar-bytes": [{"structured_outputs": {"grammar": "root ::= " + "x" * 70_000}}],
    "json-depth": [{"x": nested(65)}],
    "json-values": [{"prompt": [1] * 300_001}],
}  # fmt: skip


VLLM = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=9))  # 8 of these slots are one client's
BACKGROUND = SimpleNamespace(background_tasks={})
APP = SimpleNamespace(state=SimpleNamespace(vllm_config=VLLM, openai_serving_responses=BACKGROUND))


class Server:
    def __init__(self, text=""):
        self.limiter = limits.Limiter(self.application, {limits.VARIABLE: text})
        self.sent, self.answers = [], 0

    async def application(self, _scope, receive, send):
        body = (await receive())["body"]
        self.answers += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def ask(self, body, path=CHAT, headers=(), receive=None, send=None, client="::1"):
        async def whole():
            return {"type": "http.request", "body": body, "more_body": False}

        async def keep(message):
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers), "client": (client, 1)}
        await self.limiter({**scope, "app": APP}, receive or whole, send or keep)

    def post(self, body, **arguments):
        self.sent = []
        asyncio.run(self.ask(body if isinstance(body, bytes) else json.dumps(body).encode(), **arguments))
        return self.sent[0]["status"], self.sent[1]["body"]


# Not valid: left to vLLM.
INVALID = [b"{", b"[1]", b"\xff", b'{"n": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("body", [*(json.dumps({**USUAL, **more}).encode() for more in PASSING.values()), *INVALID])
def test_usual_and_invalid_requests_pass_unchanged(body):
    assert Server().post(body) == (200, body)


@pytest.mark.parametrize("types", [[b"application/json; a=multipart/b"], [b"application/json", b"multipart/form-data"]])
def test_no_content_type_that_vllm_reads_as_json_passes_the_bounds(types):
    headers = [(b"content-type", value) for value in types]
    assert Server().post({"n": 9}, headers=headers)[0] == 400


@pytest.mark.parametrize(("name", "request_"), [(name, each) for name, several in REFUSED.items() for each in several])
def test_a_request_above_a_bound_is_refused_by_its_name(name, request_):
    status, body = Server().post({**USUAL, **request_})
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert f"({name};" in error["message"]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("messages", {"messages": [{"role": "user", "content": [{"text": "\udfff\ud800"}]}]}),
        ("response_format", schema({"properties": {"\ud83e": {}}})),
        ("?", {"\ud800": 1}),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_its_field(field, request_):
    status, body = Server().post({**USUAL, **request_})
    error = json.loads(body)["error"]
    assert (status, error["param"], "surrogate" in error["message"]) == (400, field, True)


async def never():
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("bounds", "body", "more", "status"),
    [
        ("", b"[" * 100_000, {}, 400),  # before it is a traceback
        ("body-bytes=1000", b"x" * 2000, {"headers": [(b"content-length", b"2000")]}, 413),
        ("body-bytes=1000", b"x" * 2000, {}, 413),
        ("body-seconds=1", b"", {"receive": never}, 408),
    ],
    ids=["deep JSON", "a long body", "one of unknown length", "one that does not arrive"],
)
def test_a_body_that_cannot_be_read_is_refused(bounds, body, more, status):
    assert Server(bounds).post(body, **more)[0] == status


def test_a_response_that_nobody_reads_is_cut_and_its_place_is_free():
    server = Server("send-seconds=1, client-requests=1")

    async def stuck(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    asyncio.run(server.ask(b"{}", send=stuck))
    assert server.post({})[0] == 200


@pytest.mark.parametrize("name", ["client-requests", "requests"])
def test_more_requests_at_once_are_told_to_come_back(name):
    async def several():
        server, gate = Server(f"{name}=2"), asyncio.Event()

        async def waiting():
            await gate.wait()
            return {"type": "http.request", "body": b"{}", "more_body": False}

        running = [asyncio.create_task(server.ask(b"", receive=waiting)) for _ in range(2)]
        await asyncio.sleep(0)
        await server.ask(b"{}")
        refused = list(server.sent)
        gate.set()
        await asyncio.gather(*running)
        await server.ask(b"{}")
        return refused, server.answers

    (start, body), answers = asyncio.run(several())
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["type"] == "rate_limit_error"
    assert answers == 3


class Busy(Server):
    """A server that answers nothing before `open`; it notes each client whose request arrives."""

    def __init__(self):
        super().__init__()
        self.arrived, self.open, self.tasks = [], asyncio.Event(), []

    async def application(self, scope, receive, send):
        self.arrived.append(scope["client"][0])
        await self.open.wait()
        await super().application(scope, receive, send)

    async def request(self, client, n=1, left=None, path=CHAT, answer=None):
        """Send a request for `n` answers, echoed with `answer`; its client leaves when the event `left` is set."""
        body = json.dumps({"n": n, **(answer or {})}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await (left or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        self.tasks.append(asyncio.create_task(self.ask(b"", path=path, receive=receive, client=client)))
        await asyncio.sleep(0.01)

    async def end(self):
        self.open.set()
        await asyncio.gather(*self.tasks)


def busy(*requests):
    """Send requests (client, answers, path) to a busy server; return it, and how many arrived before it answered."""

    async def served():
        server = Busy()
        for client, n, path in requests:
            await server.request(client, n, path=path)
        arrived = len(server.arrived)
        await server.end()
        return server, arrived

    return asyncio.run(served())


def test_a_client_with_many_answers_leaves_slots_for_others():
    chats = [("a", 7), ("a", 2), ("a", 1), ("b", 8), ("b", 1)]
    server, arrived = busy(*((*chat, CHAT) for chat in chats), ("a", 1, "/tokenize"))
    assert server.arrived[:arrived] == ["a", "b", "a"]  # the third is no answer
    assert (sorted(server.arrived[arrived:]), server.answers) == (["a", "a", "b"], 6)


@pytest.mark.parametrize("chosen", ["resp_1", "mine", 'a"b\\c', "é"])
def test_a_response_in_the_background_holds_its_slots_until_it_ends(chosen):
    async def served():
        server = Busy()
        server.open.set()
        BACKGROUND.background_tasks[chosen] = asyncio.create_task(asyncio.sleep(0.1))
        await server.request("a", 8, answer={"id": chosen, "status": "queued"})
        await server.request("a", 8)
        before = server.answers
        await server.end()
        return before, server.answers

    assert asyncio.run(served()) == (1, 2)


@pytest.mark.parametrize("path", [*(f"/v1/{name}" for name in ("chat/completions/batch", "responses")), "/new", "/v1/"])
def test_every_request_that_may_generate_takes_slots(path):
    assert busy(("a", 8, CHAT), ("a", 1, path))[1] == 1


def test_a_client_that_waits_for_itself_is_served_in_order():
    server, _ = busy(*(("a", n, CHAT) for n in (8, 3, 8, 1)))
    assert [json.loads(sent["body"])["n"] for sent in server.sent if "body" in sent] == [8, 3, 8, 1]


def test_a_client_that_leaves_while_it_waits_takes_no_slot():
    async def served():
        server, left = Busy(), asyncio.Event()
        await server.request("a", 8)
        await server.request("a", 1, left)
        await server.request("a", 8)
        left.set()
        await asyncio.sleep(0.01)
        await server.end()
        return server.answers

    assert asyncio.run(served()) == 2


def test_the_guard_judges_after_the_key(monkeypatch):
    monkeypatch.setenv(access.KEY, "sesame")
    monkeypatch.setenv(access.HOSTS, "")
    guard = access.Guard(Server().application)
    server = Server()
    server.limiter = guard
    assert server.post({"n": 10_000})[0] == 401
    assert json.loads(server.post({}, path=MESSAGES)[1])["type"] == "error"  # in Anthropic's shape too
    status, body = server.post({"n": 10_000}, path=MESSAGES, headers=[(b"authorization", b"Bearer sesame")])
    assert (status, json.loads(body)["type"]) == (400, "error")
