"""What a server proves before it counts as ready: one request for each thing that clients call, checked on the wire.

A healthy server can still be unable to answer: kernels compile, and fail, at the first request that needs them; log
probabilities, JSON and tool calls each need others; and an answer can come with its content lost. A small model that
speaks little sense proves a server too: what it writes is forced, by a grammar that leaves no free text and by a bias
for the tokens that the grammar leaves it a choice of. Random weights may fail: the grammar lets them spell Harmony's
special tokens as text.

The calls are sent side by side: a server answers them all in little more time than the longest takes.

A call with a `patch` is the canary of that patch: it fails on upstream's release, and is sent where the stack has it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx

from sparkforge.core import openai
from sparkforge.core.documents import parse_json
from sparkforge.core.errors import ServerError
from sparkforge.core.openai import Endpoint

TOKENS = 64  # three times what the forced answers take
CHAT_TOKENS = 4
WHOLE_SCHEMA_TOKENS = 300  # the hundred names of _REFERRING_TOOL alone are more; without them the prompt has about 90
ABOVE_ZERO = 1e-3  # for a log probability: vLLM rounds to float32, and the likeliest token is nearly certain
SPACE_TOKENS = 32  # twice what the answer takes with the 32 spaces that the patch allows, which are two tokens
# Tokens of o200k_harmony, every gpt-oss model's vocabulary: `final`, a channel's name; ` to`, which begins a call;
# ` json`, a content type; `{`, and 16 spaces; and the special `<|start|>`, `<|channel|>`, `<|message|>`, `<|end|>`.
FINAL, TO, JSON, BRACE, SPACES = "17196", "316", "5701", "90", "408"
SPECIAL = ("200006", "200005", "200008", "200007")
ALWAYS = 100  # the API's largest bias
STORE = "VLLM_ENABLE_RESPONSES_API_STORE"  # the variable that each refusal of a server without a store names
NO_STORE = "the server stores no responses"
NOT_KEPT = "the response that is continued is not stored in the process that was asked"
ALSO = "; failed, too: "  # between why the first call failed and the names of the others
TOO_LONG = "the context is too short for a long prompt"
CITIES = ["Paris", "Rome"]
LINE = " and ".join(CITIES * 8)  # so long that a prompt is worked off while it is written
PROSE = "One two three four five six. " * 80  # about 600 tokens; the faults that are reported need 320
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris now? Use the tool."}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
# Without `strict` vLLM's grammar takes any JSON as arguments.
_STRICT_TOOL = {**TOOL, "function": {**TOOL["function"], "parameters": _SCHEMA, "strict": True}}


@dataclass(frozen=True)
class ProofRequest:
    """A request and the check of its answer; `fault` returns what is wrong, or nothing.

    It gets the answer's JSON, or the list of all events' JSON if the request asks for a stream, or the error's message
    if the server must refuse the request with the status `refused`. It may raise one of `openai.WRONG_SHAPE` for an
    answer of another shape. With `continued`, what a second request has of its own that continues the response by
    its ID, it gets both answers as a list. `beside` is what a second request has of its own that is sent once the
    stream of the first has content; it gets the stream's events and the second answer then. `patch` names the patch
    without which there is a fault.
    """

    path: str
    body: Mapping[str, Any]
    fault: Callable[[Any], str]
    patch: str = ""
    refused: HTTPStatus | None = None
    continued: Mapping[str, Any] | None = None
    beside: Mapping[str, Any] | None = None


class Limit(NamedTuple):
    """A fault of the server's that is known, which does not keep it from being ready: the check's words, and whose.

    With `patch` in the stack's queue it is no limit any more.
    """

    fault: str
    reason: str
    patch: str = ""


def prove(
    endpoint: Endpoint, timeout: float, patches: Collection[str] = (), calls: Collection[str] = ()
) -> dict[str, str]:
    """Send CALLS, of the canaries those of `patches`; return call → nothing, or the known limit that its answer shows.

    The calls are in the order of CALLS; `calls` are those that another server than vLLM has, all if there are none.
    Raises ServerError, which names each call that failed, if one is
    answered wrongly, or not within `timeout` seconds.
    """
    names = [
        name for name, call in CALLS.items() if name in (calls or CALLS) and (not call.patch or call.patch in patches)
    ]
    outcome: dict[str, str] = {}
    faults: dict[str, ServerError] = {}
    executor = ThreadPoolExecutor(len(names), "proof")
    try:
        answers = {name: executor.submit(fault_of, name, endpoint, timeout) for name in names}
        for name, answer in answers.items():
            try:
                fault = answer.result()
            except ServerError as error:
                faults[name] = error
                continue
            limits = (limit for limit in LIMITS.get(name, ()) if limit.patch not in patches)
            reason = next((limit.reason for limit in limits if fault == limit.fault), "")
            if fault and not reason:
                faults[name] = unanswered(name, fault)
            outcome[name] = reason
    finally:
        executor.shutdown(wait=False, cancel_futures=True)  # at Ctrl-C the server is ended, and with it the requests
    if faults:
        first, *others = faults
        cause = faults[first]
        also = f"{ALSO}{', '.join(others)}" if others else ""
        raise ServerError(cause.what, f"{cause.why}{also}", cause.fix, code=cause.code) from cause
    return outcome


def describe(outcome: Mapping[str, str]) -> str:
    """Return what `prove` returned in one line."""
    proved = ", ".join(name for name, limit in sorted(outcome.items()) if not limit)
    limits = ", ".join(f"{name} ({limit})" for name, limit in sorted(outcome.items()) if limit)
    return f"proved: {proved}" + (f"; known limit: {limits}" if limits else "")


def fault_of(name: str, endpoint: Endpoint, timeout: float) -> str:
    """Send one of CALLS and return what is wrong with its answer. Raises ServerError where there is none."""
    try:
        return _exchange(CALLS[name], endpoint, timeout)
    except openai.NO_ANSWER as error:
        raise unanswered(name, repr(error)) from error
    except ServerError as error:
        limits = {limit.fault for limit in LIMITS.get(name, ())}
        known = [fault for pattern, fault in _KNOWN if fault in limits and re.search(pattern, error.why)]
        if known:
            return known[0]
        raise unanswered(name, f"{error.what}: {error.why}") from error


def _exchange(call: ProofRequest, endpoint: Endpoint, timeout: float) -> str:
    body = {"model": endpoint.model, "temperature": 0, **call.body}
    if call.refused:
        return call.fault(_refusal(endpoint.send(call.path, body, timeout), call.refused))
    if call.beside is not None:
        return call.fault(_beside(endpoint, call.path, body, {**body, **call.beside}, timeout))
    if body.get("stream"):
        return call.fault(list(endpoint.events(call.path, body, timeout)))
    answer = endpoint.post(call.path, body, timeout)
    if call.continued is None:
        return call.fault(answer)
    body |= {**call.continued, "previous_response_id": answer["id"]}
    return call.fault([answer, endpoint.post(call.path, body, timeout)])


def _beside(
    endpoint: Endpoint, path: str, body: Mapping[str, Any], second: Mapping[str, Any], timeout: float
) -> tuple[list[Any], Any]:
    """Send `second` while the stream of `body` brings its content; return the events and the second answer."""
    events: list[Any] = []
    answer: Future[Any] | None = None
    with ThreadPoolExecutor(1, "proof") as executor:
        for event in endpoint.events(path, body, timeout):
            events.append(event)
            if answer is None and _streamed_content([event]):
                answer = executor.submit(endpoint.post, path, second, timeout)
        return events, answer.result() if answer else None


def unanswered(name: str, why: str) -> ServerError:
    """Return the error for a request, called `name`, that a server should answer and does not."""
    failure = "the server cannot generate"
    return ServerError(failure, f"the request for {name}: {why}", "./inv logs", code="server.reply")


def _refusal(response: httpx.Response, status: HTTPStatus) -> str:
    """Return the message of a response that refuses with `status`. Raises ServerError for any other response."""
    error = openai.response_error(response)
    if response.status_code == status:
        return error.why
    raise (
        error
        if response.is_error
        else ServerError("it was answered", "the server must refuse it", "./inv logs", code="server.reply")
    )


def tool_call_fault(message: Mapping[str, Any]) -> str:
    """Return what is wrong with a chat message that should call TOOL for a city; nothing if it does."""
    calls = message.get("tool_calls") or []
    if not calls:
        return f"no tool was called; content is {str(message.get('content'))[:60]!r}"
    function = calls[0]["function"]
    if function["name"] != TOOL["function"]["name"]:
        return f"it called {function['name']!r}, which was not offered"
    try:
        arguments = parse_json(function["arguments"], "the arguments")
    except ValueError:
        return f"the arguments are no JSON: {function['arguments'][:80]!r}"
    return "" if isinstance(arguments, dict) and arguments.get("city") else f"the arguments name no city: {arguments!r}"


def _completion(response: Any) -> str:
    text, count = response["choices"][0]["text"], response["usage"]["completion_tokens"]
    return "" if isinstance(text, str) and count == 1 else f"text {text!r}, {count} tokens instead of 1"


def _chat(response: Any) -> str:
    role, count = response["choices"][0]["message"]["role"], response["usage"]["completion_tokens"]
    good = role == "assistant" and 1 <= count <= CHAT_TOKENS
    return "" if good else f"role {role!r}, {count} of {CHAT_TOKENS} tokens"


def _streamed_completion(events: Any) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    if not all(isinstance(choice["text"], str) for choice in choices):
        return f"one of its {len(choices)} events has no text"
    return _ends(choices)


def _streamed_chat(events: Any) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    if not any(choice["delta"].get("role") == "assistant" for choice in choices):
        return f"none of its {len(choices)} events has the role"
    return _ends(choices)


def _ends(choices: Sequence[Any]) -> str:
    count = sum(1 for choice in choices if choice.get("finish_reason"))
    return "" if count == 1 else f"its {len(choices)} events have {count} ends"


def _streamed_content(events: Iterable[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def _mixed(answers: Any) -> str:
    """Judge both contents without the end of a message as text: a small model spells it after a prompt so strange."""
    events, response = answers
    line = _streamed_content(events)
    content = response["choices"][0]["message"]["content"] if response else None
    if not line or not content:
        return "content is null (finish_reason 'stop')"
    try:
        text = parse_json(_END.sub("", line), "the content")["text"]
    except (ValueError, TypeError, LookupError):
        text = line
    if text != LINE:
        return f"the answer that was being written is {str(text)[:80]!r} and not {LINE[:20]!r} and so on"
    return _json_fault(_END.sub("", content))


def _streamed_messages(events: Any) -> str:
    content = _streamed_content(events)
    return "" if content == "\n".join(CITIES) else f"the messages {CITIES} come as {content!r}"


def _logprobs(response: Any) -> str:
    entries = response["choices"][0]["logprobs"]["content"]
    return _out_of_range(value["logprob"] for entry in entries for value in (entry, *entry["top_logprobs"]))


def _content_logprobs(response: Any) -> str:
    choice = response["choices"][0]
    tokens = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    return "" if tokens == (choice["message"]["content"] or "") else f"their tokens are {tokens[:60]!r}"


def _whole_schema(response: Any) -> str:
    count = response["usage"]["prompt_tokens"]
    return "" if count > WHOLE_SCHEMA_TOKENS else f"the prompt has {count} tokens: the tool's schema is lost"


def _begun_call(response: Any) -> str:
    message = response["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    named = calls and calls[0]["function"]["name"] == "get_weather"
    return "" if named else f"no tool was called; content is {str(message.get('content'))[:60]!r}"


def _named(word: str) -> Callable[[str], str]:
    def fault(message: str) -> str:
        return "" if word in message else f"the refusal does not name the fault: {message[:80]!r}"

    return fault


def _is_response(response: Any) -> str:
    return "" if "output" in response else "it is no response"


def _prompt_logprobs(response: Any) -> str:
    _first, *tokens = response["choices"][0]["prompt_logprobs"]  # nothing stands before the first token
    return _out_of_range([entry["logprob"] for token in tokens for entry in token.values()])


def _out_of_range(logprobs: Iterable[float]) -> str:
    values = list(logprobs)
    good = values and all(-math.inf < value <= ABOVE_ZERO for value in values)
    return "" if good else f"the log probabilities are {values[:8]}"


def _json(response: Any) -> str:
    choice = response["choices"][0]
    content = choice["message"]["content"]
    return f"content is null (finish_reason {choice['finish_reason']!r})" if content is None else _json_fault(content)


def _json_fault(content: str) -> str:
    try:
        value = parse_json(content, "the content")
    except ValueError:
        return f"the content is no JSON: {content[:80]!r}"
    valid = isinstance(value, dict) and list(value) == ["city"] and value["city"] in CITIES
    return "" if valid else f"the content does not follow the schema: {content[:80]!r}"


def _stop(response: Any) -> str:
    content = response["choices"][0]["message"]["content"]
    if content is None or '"city' in content:  # vLLM before 0.32.0 loses it, or leaves the stop string in
        return "the content does not end before the stop string"
    return "" if content.strip() == "{" else f"the content is {content[:60]!r}"


def _tool_call(response: Any) -> str:
    return tool_call_fault(response["choices"][0]["message"])


def _header(response: Any) -> str:
    content = response["choices"][0]["message"]["content"]
    return "" if content == CITIES[0] else f"the content is {content!r} and not {CITIES[0]!r}"


def _forbidden(response: Any) -> str:
    tool_calls = response["choices"][0]["message"].get("tool_calls")
    return "a tool was called" if tool_calls else _header(response)


def _cut_call(response: Any) -> str:
    arguments = response["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    return "" if arguments.strip() == "{" else f"the arguments {arguments[:60]!r} do not end before the stop string"


def _forbidden_response(response: Any) -> str:
    types = [item["type"] for item in response["output"]]
    return "" if set(types) == {"message"} else f"its items are {types} instead of messages"


def _unknown_response(message: str) -> str:
    if STORE in message:
        return NO_STORE
    good = "one of the last" in message and "`input`" in message
    return "" if good else f"the refusal does not say what to do: {message[:80]!r}"


def _continued(responses: Any) -> str:
    first, second = (response["usage"]["input_tokens"] for response in responses)
    return "" if second < first else f"the first response's instructions are still there: {first}, then {second} tokens"


def _failed_response(events: Any) -> str:
    last = events[-1]["type"]
    if last != "response.failed":
        return f"its last event is {last!r} and not 'response.failed'"
    return _named("nonsense")(events[-1]["response"]["error"]["message"])


def _response(response: Any) -> str:
    types = [item["type"] for item in response["output"]]
    if types != ["message"]:
        return f"its items are {types} instead of one message"
    return _json_fault(response["output"][0]["content"][0]["text"])


def _white_space(response: Any) -> str:
    choice = response["choices"][0]
    return "" if choice["finish_reason"] == "stop" else f"it does not end within {SPACE_TOKENS} tokens"


# What forces the model to begin a final message and to write a text there, special tokens too.
_WRITE = dict.fromkeys((FINAL, *SPECIAL), ALWAYS)
_CALL = f"<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>{CITIES[0]}"


def _tag(text: str) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "const_string", "value": text}}


_COMPLETIONS, _CHAT, _RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": _SCHEMA}}
_JSON_REQUEST = {"messages": ASK, "max_tokens": TOKENS, "logit_bias": {FINAL: ALWAYS}, "response_format": _FORMAT}
_TOOL_REQUEST = {
    "messages": ASK,
    "max_tokens": TOKENS,
    "logit_bias": {TO: ALWAYS},
    "tools": [_STRICT_TOOL],
    "tool_choice": "required",
}
_LINE_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "enum": [LINE]}},
    "required": ["text"],
    "additionalProperties": False,
}
_LINE_FORMAT = {"type": "json_schema", "json_schema": {"name": "line", "strict": True, "schema": _LINE_SCHEMA}}
_REFERRING_TOOL = {
    "type": "function",
    "function": {
        "name": "visit",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "$defs": {"City": {"enum": [f"city {number}" for number in range(100)]}},
        },
    },
}
_INVALID = {"name": "x", "schema": {"type": "nonsense"}}
_BOUNDED = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "^[a-z]{0,300}$"}},
}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
CALLS: Mapping[str, ProofRequest] = {
    "a completion": ProofRequest(_COMPLETIONS, {"prompt": "Hello", "max_tokens": 1}, _completion),
    "a streamed completion": ProofRequest(
        _COMPLETIONS, {"prompt": "Hello", "max_tokens": 2, "stream": True}, _streamed_completion
    ),
    "a chat": ProofRequest(_CHAT, {"messages": ASK, "max_tokens": CHAT_TOKENS}, _chat),
    "a streamed chat": ProofRequest(
        _CHAT, {"messages": ASK, "max_tokens": CHAT_TOKENS, "stream": True}, _streamed_chat
    ),
    "log probabilities": ProofRequest(_CHAT, {**_JSON_REQUEST, "logprobs": True, "top_logprobs": 1}, _logprobs),
    "log probabilities of the prompt": ProofRequest(
        _COMPLETIONS, {"prompt": "One two three", "max_tokens": 1, "prompt_logprobs": 1}, _prompt_logprobs
    ),
    "a JSON answer": ProofRequest(_CHAT, _JSON_REQUEST, _json),
    # Users report illegal memory accesses of CUDA graphs in steps that have both (docs/hardware.md).
    "a long prompt beside an answer": ProofRequest(
        _CHAT,
        {**_JSON_REQUEST, "max_tokens": 4 * TOKENS, "stream": True, "response_format": _LINE_FORMAT},
        _mixed,
        beside={
            "messages": [{"role": "user", "content": PROSE}, *ASK],
            "max_tokens": TOKENS,
            "stream": False,
            "response_format": _FORMAT,
        },
    ),
    "a stop string": ProofRequest(_CHAT, {**_JSON_REQUEST, "stop": ['"city']}, _stop),
    "a tool call": ProofRequest(_CHAT, _TOOL_REQUEST, _tool_call),
    "a stop string in a tool call": ProofRequest(
        _CHAT,
        {**_TOOL_REQUEST, "stop": ['"city']},
        _cut_call,
        patch="0006-leave-stop-strings-out-of-harmony-text.patch",
    ),
    "a JSON answer with a content type": ProofRequest(
        _CHAT,
        {**_JSON_REQUEST, "logit_bias": {FINAL: ALWAYS, JSON: ALWAYS}},
        _json,
        patch="0004-read-final-json-as-content-type.patch",
    ),
    "a JSON response": ProofRequest(
        _RESPONSES,
        {
            "input": ASK[0]["content"],
            "max_output_tokens": TOKENS,
            "logit_bias": {FINAL: ALWAYS, JSON: ALWAYS},
            "text": {"format": {"type": "json_schema", "name": "place", "strict": True, "schema": _SCHEMA}},
        },
        _response,
        patch="0004-read-final-json-as-content-type.patch",
    ),
    "a malformed header": ProofRequest(
        _CHAT,
        {
            "messages": ASK,
            "max_tokens": TOKENS,
            "logit_bias": _WRITE,
            "response_format": _tag(f"<|end|><|channel|>final<|message|>{CITIES[0]}"),
        },
        _header,
        patch="0005-recover-malformed-harmony-headers.patch",
    ),
    "a forbidden call": ProofRequest(
        _CHAT,
        {
            "messages": ASK,
            "max_tokens": TOKENS,
            "tools": [TOOL],
            "tool_choice": "none",
            "logit_bias": _WRITE,
            "response_format": _tag(_CALL),
        },
        _forbidden,
        patch="0007-give-forbidden-harmony-calls-as-content.patch",
    ),
    "a forbidden call in a response": ProofRequest(
        _RESPONSES,
        {
            "input": ASK[0]["content"],
            "max_output_tokens": TOKENS,
            "tools": [{"type": "function", **TOOL["function"]}],
            "tool_choice": "none",
            "logit_bias": _WRITE,
            "structured_outputs": {"structural_tag": json.dumps(_tag(_CALL))},
        },
        _forbidden_response,
        patch="0007-give-forbidden-harmony-calls-as-content.patch",
    ),
    "a refused schema": ProofRequest(
        _CHAT,
        {
            "messages": ASK,
            "max_tokens": 1,
            "response_format": {"type": "json_schema", "json_schema": _INVALID},
        },
        _named("nonsense"),
        patch="0008-name-the-fault-of-a-structural-tag.patch",
        refused=HTTPStatus.BAD_REQUEST,
    ),
    "a refused image": ProofRequest(
        _CHAT,
        {"messages": [{"role": "user", "content": [_IMAGE]}], "max_tokens": 1},
        _named("text only"),
        patch="0009-refuse-harmony-content-that-is-not-text.patch",
        refused=HTTPStatus.BAD_REQUEST,
    ),
    "limited white space": ProofRequest(
        _CHAT,
        {**_JSON_REQUEST, "max_tokens": SPACE_TOKENS, "logit_bias": dict.fromkeys((FINAL, BRACE, SPACES), ALWAYS)},
        _white_space,
        patch="0010-limit-white-space-in-harmony-json.patch",
    ),
    "an unknown response": ProofRequest(
        _RESPONSES,
        {"input": "Go on.", "max_output_tokens": 1, "previous_response_id": "resp_0"},
        _unknown_response,
        patch="0011-bound-the-store-of-responses.patch",
        refused=HTTPStatus.NOT_FOUND,
    ),
    "a continued response": ProofRequest(
        _RESPONSES,
        {"input": "Hello", "max_output_tokens": 1, "instructions": "Be brief. " * 20},
        _continued,
        patch="0012-take-instructions-and-tools-of-the-continuing-request.patch",
        continued={"input": "Go on.", "instructions": None},
    ),
    "a response that fails": ProofRequest(
        _RESPONSES,
        {
            "input": "Hello",
            "max_output_tokens": 1,
            "background": True,
            "stream": True,
            "text": {"format": {"type": "json_schema", **_INVALID}},
        },
        _failed_response,
        patch="0014-end-responses-that-fail.patch",
    ),
    "two streamed messages": ProofRequest(
        _CHAT,
        {
            "messages": ASK,
            "max_tokens": TOKENS,
            "stream": True,
            "logit_bias": _WRITE,
            "response_format": _tag("<|end|><|start|>assistant<|channel|>final<|message|>".join(CITIES)),
        },
        _streamed_messages,
        patch="0015-separate-streamed-harmony-messages.patch",
    ),
    "a whole tool schema": ProofRequest(
        _CHAT,
        {"messages": ASK, "max_tokens": 1, "tools": [_REFERRING_TOOL]},
        _whole_schema,
        patch="0016-render-whole-tool-schemas.patch",
    ),
    "a call beside a schema": ProofRequest(
        _CHAT,
        {**_TOOL_REQUEST, "max_tokens": 12, "tools": [TOOL], "tool_choice": "auto", "response_format": _FORMAT},
        _begun_call,
        patch="0017-leave-calls-free-beside-a-format.patch",
    ),
    "a removed field": ProofRequest(
        _CHAT,
        {"messages": ASK, "max_tokens": 1, "guided_json": _SCHEMA},
        _named("guided_json"),
        patch="0018-name-what-is-wrong-with-a-request.patch",
        refused=HTTPStatus.BAD_REQUEST,
    ),
    "a bounded pattern": ProofRequest(
        _CHAT,
        {"messages": ASK, "max_tokens": 1, "response_format": _BOUNDED},
        _chat,
        patch="0030-compile-grammars-apart.patch",
    ),
    "log probabilities of the content": ProofRequest(
        _CHAT,
        {**_JSON_REQUEST, "logprobs": True},
        _content_logprobs,
        patch="0019-give-the-content-its-tokens.patch",
    ),
    "an output of parts": ProofRequest(
        _RESPONSES,
        {
            "max_output_tokens": 1,
            "input": [
                {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Rain"}]},
            ],
        },
        _is_response,
        patch="0020-take-what-agents-send-to-responses.patch",
    ),
    "a server tool": ProofRequest(
        "/v1/messages/count_tokens",
        {"messages": ASK, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        _named("'web_search'"),
        patch="0021-read-anthropic-requests-for-harmony.patch",
        refused=HTTPStatus.BAD_REQUEST,
    ),
}
_END = re.compile(r"<\|(?:end|return)\|>$")
# What the refusal of a request says that is a limit of the server's, and the fault that stands for it in LIMITS.
_KNOWN = (
    (STORE, NO_STORE),
    (r"Response with id '\S+' not found", NOT_KEPT),  # a wrong path or model has other words
    (r"maximum context length|maximum model length|max_model_len", TOO_LONG),
)
_STORE_LIMIT = Limit(NO_STORE, f"previous_response_id is off, {STORE}=1 turns it on")
# Patches of the queues for 0.32.0 and 0.33.0 cure the first two; the vLLM of the stack ngc-25.12 is older. That nothing
# is stored, or that there is a store in each of several processes, is the user's choice.
LIMITS: Mapping[str, Sequence[Limit]] = {
    "a JSON answer": [
        Limit(
            "content is null (finish_reason 'stop')",
            "content is lost, vLLM #41902",
            "0004-read-final-json-as-content-type.patch",
        )
    ],
    "a long prompt beside an answer": [
        Limit(TOO_LONG, "--max-model-len leaves no room for it"),
        Limit(
            "content is null (finish_reason 'stop')",
            "content is lost, vLLM #41902",
            "0004-read-final-json-as-content-type.patch",
        ),
    ],
    "a stop string": [
        Limit(
            "the content does not end before the stop string",
            "it stays in the answer, vLLM #52599",
            "0006-leave-stop-strings-out-of-harmony-text.patch",
        )
    ],
    "an unknown response": [_STORE_LIMIT],
    "a continued response": [
        _STORE_LIMIT,
        Limit(NOT_KEPT, "--api-server-count or a small VLLM_RESPONSES_API_STORE_MAX_ENTRIES loses responses"),
    ],
    "a response that fails": [_STORE_LIMIT],
}
