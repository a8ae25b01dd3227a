"""Limits on the work of one request: bounds on its body, its rate and its connection; errors name the bound.

`access.Guard` puts `Limiter` after the key's check, so the bounds hold on every device. The body is parsed once,
before vLLM sees it. The compile time of a grammar is measured outside the engine by patch 0030 of vLLM's queues,
which reads `grammar-seconds` from VLLM_GRAMMAR_COMPILATION_CPU_S; patch 0031 reads `header-seconds`. vLLM serves in
order and has a number of slots, `--max-num-seqs`. So one client's requests wait here once its answers have taken all
slots but a ninth, and other clients find a free one.

    SPARKFORGE_LIMITS="sequences=32, body-seconds=120"     # 0 switches a bound off

Nothing but the standard library is imported: vLLM's process loads this module.
"""

import asyncio
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from sparkforge.core.errors import UsageError

VARIABLE = "SPARKFORGE_LIMITS"
# After this time a thread that parses a large body releases the GIL to the event loop. The loop needs the GIL many
# times in a request: with Python's default of 5 ms other clients waited for seconds.
SWITCH_SECONDS = 0.0005
PATCHED = {"grammar-seconds": "VLLM_GRAMMAR_COMPILATION_CPU_S", "header-seconds": "VLLM_HTTP_TIMEOUT_HEADERS"}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Bound:
    """A bound: its default, what it counts, the HTTP status of a request above it."""

    default: int
    counts: str
    status: int = 400


LIMITS = {  # name → bound
    name: Bound(**row) for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
MANY = 4096  # tokens counted for an answer without max_tokens
# Ends of paths that take no slot: no answer is generated, or the profiler is switched.
SLOTLESS = frozenset({
    "tokenize", "detokenize", "count_tokens", "cancel", "ping", "start_profile", "stop_profile",
})  # fmt: skip
# A response's id, in its first piece. A client may choose it, also with escaped quotes.
RESPONSE_ID = re.compile(rb'"id": ?("(?:[^"\\]|\\.)*")')
# Fields with several prompts → the type of one: of a completion, a batch, /generative_scoring and /v1/systemone.
PROMPTS: Mapping[str, type | tuple[type, ...]] = {
    "prompt": (str, list), "messages": list, "items": (str, list), "questions": object,
}  # fmt: skip
GRAMMARS = ("response_format", "structured_outputs", "output_config", "output_format", "text")
SHARE = 9  # a client's answers leave this part of the slots free
BRANCHES = ("anyOf", "oneOf", "allOf", "prefixItems", "enum")
REPEAT = re.compile(r"\{(\d*)(?:,(\d*))?\}|[()]|\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
BIG_BODY = 256 << 10  # bytes; a larger body is checked in a thread
LARGEST = 10**12
# HTTP status → the type that OpenAI's and Anthropic's errors have for it, "invalid_request_error" for others.
KINDS = {401: "access_error", 403: "access_error", 404: "access_error", 429: "rate_limit_error"}
CLOSE = (b"connection", b"close")  # the rest of a body that was refused unread would otherwise be read
HEADERS = {401: (b"www-authenticate", b"Bearer"), 408: CLOSE, 413: CLOSE, 429: (b"retry-after", b"1")}


class RequestError(Exception):
    """A request is refused."""

    def __init__(self, why: str, parameter: str | None = None, status: int = 400) -> None:
        super().__init__(why)
        self.parameter, self.status = parameter, status

    async def answer(self, scope: Scope, send: Send) -> None:
        """Refuse the request in the shape of OpenAI's errors, or of Anthropic's on /v1/messages."""
        error: dict[str, Any] = {"type": KINDS.get(self.status, "invalid_request_error"), "message": str(self)}
        if scope["path"].removeprefix(scope.get("root_path", "")).startswith("/v1/messages"):
            document = {"type": "error", "error": error}
        else:
            document = {"error": {**error, "param": self.parameter, "code": self.status}}
        body = json.dumps(document).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [HEADERS[self.status]] if self.status in HEADERS else []
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class LimitError(RequestError):
    """A request is above a bound."""

    def __init__(self, name: str, why: str, parameter: str | None = None) -> None:
        super().__init__(f"{why} ({name}; {VARIABLE} sets it)", parameter, LIMITS[name].status)


def read(environment: Mapping[str, str]) -> dict[str, int]:
    """Return every bound by name, the defaults and what SPARKFORGE_LIMITS sets; 0 is no bound. Raises UsageError."""
    limits = {name: limit.default for name, limit in LIMITS.items()}
    for word in environment.get(VARIABLE, "").replace(",", " ").split():
        name, _, number = word.partition("=")
        if name not in limits:
            why = f"it has {', '.join(limits)}"
            fix = f"{VARIABLE}=   # the defaults; docs/reference/settings.md has the bounds"
            raise UsageError(f"{VARIABLE} has no {name[:40]!r}", why, fix)
        if not (number.isascii() and number.isdecimal() and len(number) < 13):
            why = f"{name} is {number[:40]!r}; it must be a whole number, 0 for no bound"
            raise UsageError(f"{VARIABLE} is invalid", why, f'{VARIABLE}="{name}={limits[name]}"')
        limits[name] = int(number)
    return limits


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the server that vLLM's own patches read. Raises UsageError."""
    limits = read(environment)
    return {variable: str(limits[name]) for name, variable in PATCHED.items()}


@dataclass
class Judge:
    """Compares one body with the bounds; `check` raises LimitError, and RequestError for text with a lone surrogate."""

    limits: Mapping[str, int]
    _values: Counter[str] = field(default_factory=Counter)

    def check(self, body: bytes) -> int:
        """Check a request's body; return how many answers it wants. vLLM refuses what is not a JSON object."""
        try:
            request = json.loads(body)
        except RecursionError:
            raise LimitError("json-depth", "the body nests lists and objects too deep") from None
        except ValueError:
            return 1
        self._tree(request, "json-depth", "json-values", "the body", None)
        if not isinstance(request, dict):
            return 1
        # A lone surrogate, which JSON can hold and UTF-8 cannot: tokenizers, grammars and vLLM's engine fail with it.
        for name, value in request.items() if SURROGATE.search(body) else ():
            try:
                json.dumps([name, value], ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = f"U+{ord(error.object[error.start]):04X}"
                parameter = name.encode(errors="replace").decode()
                why = f"{parameter} has a lone surrogate ({half}), which UTF-8 cannot hold"
                raise RequestError(why, parameter) from None
        # The text for the tokenizer, which serves one request at a time; base64 data gets another error.
        texts = (item for level in _levels(request) for item in level if isinstance(item, str))
        count = sum(len(text) for text in texts if not text.startswith("data:"))
        self._most("text", count, "characters of texts")
        answers = self._sequences(request)
        self._sampling(request)
        echoed = request.get("echo") and (request.get("logprobs") is not None or "prompt" not in request)
        if echoed or request.get("prompt_logprobs") is not None:
            tokens = sum(type(item) is int for level in _levels(request.get("prompt")) for item in level)
            name = "prompt" if "prompt" in request else "messages"
            tokens = tokens or count // 2
            self._most("scored-tokens", tokens, "tokens of prompts with log probabilities", name)
            each = max(_number(request.get(kind)) for kind in ("logprobs", "top_logprobs", "prompt_logprobs"))
            several = max(1, _number(request.get("n")))
            self._most("scores", several * tokens * (1 + each), "log probabilities of prompts", name)
        self._schemas(request)
        return answers

    def _most(self, name: str, number: int, what: str, parameter: str | None = None) -> None:
        most = self.limits[name]
        if most and number > most:
            raise LimitError(name, f"{what}: {number:,} is more than {most:,}", parameter)

    def _tree(self, value: Any, depth: str, values: str, what: str, parameter: str | None) -> None:
        for deep, level in enumerate(_levels(value), 1):
            self._values[values] += len(level)
            self._most(depth, deep, f"levels of {what}", parameter)
            self._most(values, self._values[values], f"values of {what}", parameter)

    def _sequences(self, request: dict[str, Any]) -> int:
        prompts = 1
        for name, prompt in PROMPTS.items():
            parts = request.get(name)
            parts = list(parts.values()) if isinstance(parts, dict) else parts
            if isinstance(parts, list) and len(parts) > 1 and isinstance(parts[0], prompt):
                texts = (item for level in _levels(parts) for item in level if isinstance(item, str | int))
                characters = sum(len(text) if isinstance(text, str) else 4 for text in texts)
                self._most("prompts-text", characters, f"characters of {name}", name)
                self._most("prompts", len(parts), f"entries of {name}", name)
                prompts = max(prompts, len(parts))
        for name in ("messages", "input"):
            if isinstance(items := request.get(name), list):
                self._most("messages", len(items), name, name)
        wanted = max(("n", "best_of"), key=lambda name: _number(request.get(name)))
        sequences = prompts * max(1, _number(request.get(wanted)))
        self._most("sequences", sequences, "answers of one request", wanted)
        if sequences > 1:
            names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
            each = max(_number(request.get(name)) for name in names) or MANY
            self._most("sequence-tokens", sequences * each, f"tokens of {sequences} answers", wanted)
        return sequences

    def _sampling(self, request: dict[str, Any]) -> None:
        for name in ("stop", "stop_sequences", "stop_token_ids", "bad_words"):
            items = request.get(name)
            items = [items] if isinstance(items, str) else items if isinstance(items, list) else []
            self._most("bad-words" if name == "bad_words" else "stop", len(items), f"entries of {name}", name)
            longest = max((len(item) for item in items if isinstance(item, str)), default=0)
            self._most("stop-length", longest, f"characters in {name}", name)
        if isinstance(bias := request.get("logit_bias"), dict):
            self._most("logit-bias", len(bias), "tokens of logit_bias", "logit_bias")
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            self._most("logprobs", _number(request.get(name)), name, name)

    def _schemas(self, request: dict[str, Any]) -> None:
        """Check tools and the sources of grammars; bounds on bytes and values apply to their sum."""
        if isinstance(tools := request.get("tools"), list):
            self._most("tools", len(tools), "tools", "tools")
        size = 0
        for name in ("tools", "functions", *GRAMMARS):
            if (value := request.get(name)) is None:
                continue
            size += len(json.dumps(value))
            self._most("schema-bytes", size, "bytes of schemas and tools", name)
            value = _decoded(value)
            self._tree(value, "schema-depth", "schema-values", name, name)
            for level in ([value], *_levels(value)):  # the parts of a schema, a structural tag, or structured_outputs
                for part in level:
                    if isinstance(part, dict):
                        self._part(part, name, name in GRAMMARS)

    def _part(self, part: dict[str, Any], parameter: str, constrains: bool) -> None:
        if isinstance(properties := part.get("properties"), dict):
            self._most("schema-properties", len(properties), "properties", parameter)
            required = part.get("required")
            optional = len(properties) - (len(required) if isinstance(required, list) else 0)
            self._most("schema-optional", optional if constrains else 0, "properties that are not required", parameter)
        for name in (*BRANCHES, "choice"):
            if isinstance(part.get(name), list):
                self._most("enum", len(part[name]), f"entries of {name}", parameter)
        for name in ("pattern", "regex"):
            if isinstance(part.get(name), str):
                self._most("regex-length", len(part[name]), f"characters of a {name}", parameter)
                self._most("regex-repeats", repeats(part[name]), f"repeats of a {name}", parameter)
        if isinstance(grammar := part.get("grammar"), str):
            self._most("grammar-bytes", len(grammar.encode(errors="replace")), "bytes of a grammar", parameter)


def repeats(pattern: str) -> int:
    """Return the largest product of nested bounds of a regular expression: 2,500 for `(a{1,50}b){50}`."""
    inner, closed, largest = [1], 1, 1
    for match in REPEAT.finditer(pattern):
        if match[0] == "(":
            inner.append(1)
        elif match[0] == ")":
            closed = inner.pop() if len(inner) > 1 else 1
            inner[-1] = max(inner[-1], closed)
            continue
        elif match[0].startswith("{") and (match[1] or match[2]):
            behind_group = match.start() and pattern[match.start() - 1] == ")"
            bounds = max(min(int(number[:12]), LARGEST) for number in (match[1], match[2]) if number)
            inner[-1] = max(inner[-1], min(LARGEST, bounds * (closed if behind_group else 1)))
            largest = max(largest, inner[-1])
    return largest


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values that are inside `value`, level by level."""
    level = [value]
    while level := [child for item in level for child in _children(item)]:
        yield level


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _number(value: Any) -> int:
    """Return a number in a request; 0 if the value is not a number, which vLLM refuses."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return 0
    try:
        return int(min(float(value), LARGEST))
    except (ValueError, OverflowError):
        return 0


def _decoded(value: Any) -> Any:
    """Return structured_outputs with the schemas that it holds as text decoded."""
    if not isinstance(value, dict):
        return value
    decoded = dict(value)
    for name in ("json", "structural_tag"):
        if isinstance(text := value.get(name), str):
            try:
                decoded[name] = json.loads(text)
            except RecursionError:
                raise LimitError("schema-depth", f"{name} nests lists and objects too deep", name) from None
            except ValueError:
                continue
    return decoded


class Line:
    """One client's answers that run, and its requests that wait, first come first served."""

    def __init__(self) -> None:
        self._answers, self._order, self._ended = 0, asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def slots(self, answers: int, most: int, receive: Receive) -> AsyncIterator[bool]:
        """Hold slots for `answers`: wait until at most `most` are held, or no others. Yield False if the client leaves.

        `receive` returns only when the client leaves, because the body was read.
        """
        turn = asyncio.ensure_future(self._turn(answers, most))
        try:
            await asyncio.sleep(0)
            if not turn.done():
                left = asyncio.ensure_future(receive())
                try:
                    await asyncio.wait({turn, left}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    left.cancel()
            yield turn.done()
        finally:
            if not turn.cancel():  # False: it had ended, so the slots are held
                self._answers -= answers
                self._ended.set()

    async def _turn(self, answers: int, most: int) -> None:
        async with self._order:
            while self._answers and self._answers + answers > most:
                self._ended.clear()
                await self._ended.wait()
            self._answers += answers


class Limiter:
    """ASGI middleware: a request passes if it is within the bounds. Raises UsageError for a wrong SPARKFORGE_LIMITS."""

    def __init__(self, app: Application, environment: Mapping[str, str]) -> None:
        self._app, self._limits = app, read(environment)
        self._running: Counter[str] = Counter()
        self._lines: WeakValueDictionary[str, Line] = WeakValueDictionary()
        # One at a time, because parsing holds the GIL, for which the event loop waits.
        self._big_bodies = asyncio.Lock()
        sys.setswitchinterval(SWITCH_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] != "http" or scope["method"] not in {"POST", "PUT", "PATCH", "DELETE"}:
            await self._app(scope, receive, send)
            return
        client, is_cut = str((scope.get("client") or ("",))[0]), False
        counted = {"client-requests": client, "requests": ""}  # bound → key of the count

        async def bounded_send(message: Message) -> None:
            nonlocal is_cut
            try:
                async with asyncio.timeout(self._limits["send-seconds"] or None):
                    await send(message)  # waits while the connection's buffer is full
            except TimeoutError:
                is_cut = True
                raise ConnectionError("the client does not read the response") from None

        try:
            self._admit(counted)
            try:
                if read := await self._read(scope["headers"], receive):
                    answers, whole = read
                    if scope["path"].rpartition("/")[2] in SLOTLESS:
                        await self._app(scope, whole, bounded_send)
                        return
                    slots = scope["app"].state.vllm_config.scheduler_config.max_num_seqs
                    line = self._lines.setdefault(client, Line())
                    async with line.slots(answers, slots - slots // SHARE, receive) as is_there:
                        if is_there:
                            await self._generate(scope, whole, bounded_send)
            finally:
                self._running -= Counter(counted.values())  # which drops counts of 0
        except RequestError as error:
            await error.answer(scope, send)
        except Exception:
            if not is_cut:
                raise

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and return when its answer is made: one in the background ends after its request."""
        started: str | None = None

        async def noted_send(message: Message) -> None:
            nonlocal started
            if started is None and "body" in message:
                found = RESPONSE_ID.search(message["body"])
                started = json.loads(found[1]) if found else ""
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        finally:
            if started and (task := scope["app"].state.openai_serving_responses.background_tasks.get(started)):
                await asyncio.wait({task})

    def _admit(self, counted: Mapping[str, str]) -> None:
        for name, key in counted.items():
            if self._limits[name] and self._running[key] >= self._limits[name]:
                raise LimitError(name, f"{self._running[key]} requests are running; try again in a second")
        self._running.update(counted.values())

    async def _read(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> tuple[int, Receive] | None:
        """Return the number of wanted answers and a `receive` of the checked body; None if the client left."""
        most, body, more = self._limits["body-bytes"] or sys.maxsize, bytearray(), True
        length = dict(headers).get(b"content-length", b"0")[:18]
        size = int(length) if length.isdigit() else 0
        try:
            async with asyncio.timeout(self._limits["body-seconds"] or None):
                while size <= most and more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    size, more = max(size, len(body)), message.get("more_body", False)
        except TimeoutError:
            raise LimitError("body-seconds", "the body did not arrive in time") from None
        if size > most:
            raise LimitError("body-bytes", f"the body has more than {most:,} bytes")
        answers = 1
        types = [value.strip().lower() for name, value in headers if name == b"content-type"]
        if not (types and all(value.startswith(b"multipart/") for value in types)):  # it may be read as JSON
            judge = Judge(self._limits)
            if len(body) > BIG_BODY:
                async with self._big_bodies:
                    answers = await asyncio.to_thread(judge.check, bytes(body))
            else:
                answers = judge.check(bytes(body))
        messages = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def whole() -> Message:
            return messages.pop() if messages else await receive()

        return answers, whole
