"""The start-up test of a server before it counts as ready: one request for each feature that clients call.

A healthy server can still be unable to answer: kernels compile, and fail, at the first request that needs them. The
test also works with a small model that writes little sense, because its output is forced: by a grammar without free
text, and by a logit bias where the grammar leaves a choice. Random weights may fail: the grammar lets them spell
Harmony's special tokens as text.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from sparkforge.core import openai
from sparkforge.core.errors import ServerError
from sparkforge.core.files import parse_json
from sparkforge.core.openai import Endpoint
from sparkforge.plan import families

TOKENS = 64  # three times what the forced answers take
CHAT_TOKENS = 4
CALL_TOKENS = 24  # twice a call's header, which a model may spell in more tokens than needed
WHOLE_SCHEMA_TOKENS = 300  # the hundred names of REFERRING_TOOL alone are more; without them the prompt has about 90
SPACE_TOKENS = 32  # twice what the answer takes with the 32 spaces that the patch allows, which are two tokens
# Vocabulary tokens of the forms that the patch queues change; families.toml explains each.
FORCED = next(family.chat.tokens for family in families.load().values() if family.chat.tokens)
FINAL, TO, JSON, BRACE, SPACES, END = (str(FORCED[word]) for word in ("final", "to", "json", "brace", "spaces", "end"))
SPECIAL = (*(str(FORCED[word]) for word in ("start", "channel", "message")), END)
BIAS = "logit_bias"
MAX_BIAS = 100  # the API's largest bias
STORE = "VLLM_ENABLE_RESPONSES_API_STORE"  # the variable that each refusal of a server without a store names
REFUSED_BIAS = r"logit_bias\b.*\bspeculative decoding"
LOST = "content is null (finish_reason 'stop')"
FURTHER_FAILURES = "; failed, too: "  # between why the first call failed and the names of the others
CITIES = ["Paris", "Rome"]
ANSWER = "<|channel|>final<|message|>{}<|end|><|return|>"
JSON_ANSWER = "<|channel|>final json<|message|>{}<|end|><|return|>"
# In channel `final`, because text may precede the call where `commentary` is allowed.
SPELLED_CALL = ' to=functions.get_weather<|channel|>final json<|message|>{"city": "Paris"}<|end|><|return|>'
LINE = " and ".join(CITIES * 4)  # so long that another prompt is processed while it is generated
PROSE = "One two three four five six. " * 80  # about 600 tokens; the reported faults need 320
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris now? Use the tool."}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class ProofRequest:
    """A request and the check of its answer; `fault` returns what is wrong, or nothing.

    `fault` gets the answer's JSON, or the list of all events' JSON if the request asks for a stream, or the error's
    message if the server must refuse the request with the status `refused`. It may raise one of `openai.WRONG_SHAPE`.
    `continued` has the fields that differ in a second request, which continues the response by its ID, and `beside`
    those of one that is sent once the stream has content; `fault` then gets both answers. `patch` names the patch
    without which there is a fault: the request is its canary, sent if the stack has the patch. `spelled` is the
    expected answer for a server with a draft, which supports no bias: only its tokens are allowed. Without `spelled`
    the request tests nothing there.
    """

    path: str
    body: Mapping[str, Any]
    fault: Callable[[Any], str]
    patch: str = ""
    refused: HTTPStatus | None = None
    continued: Mapping[str, Any] | None = None
    beside: Mapping[str, Any] | None = None
    spelled: str = ""


class Limit(NamedTuple):
    """A known fault that does not keep a server from being ready, unless the stack has `patch`.

    `pattern` is a regular expression for the check's fault or for the message of the server's refusal.
    """

    pattern: str
    reason: str
    patch: str = ""


def prove(
    endpoint: Endpoint, timeout: float, patches: Collection[str] = (), calls: Collection[str] = (), family: str = ""
) -> dict[str, str]:
    """Send CALLS, with the canaries of `patches`; return call → empty, or the known limit that its answer shows.

    The calls are sent concurrently. `calls` names the only ones to send, for a server other than vLLM. `family` is by
    default that of the default models; one with another vocabulary gets no canaries, and no token is forced. Raises
    ServerError, which names each failed call, if one is answered wrongly, or not within `timeout` seconds.
    """
    chat = families.load()[family or families.default()].chat
    ask = fault_of if chat.tokens else partial(fault_of, added=chat.request)
    sent = {"", *patches} if chat.tokens else {""}
    chosen = [name for name, call in CALLS.items() if name in (calls or CALLS) and call.patch in sent]
    outcome: dict[str, str] = {}
    faults: dict[str, ServerError] = {}
    executor = ThreadPoolExecutor(len(chosen), "proof")
    try:
        answers = {name: executor.submit(ask, name, endpoint, timeout) for name in chosen}
        for name, answer in answers.items():
            try:
                fault = answer.result()
            except ServerError as error:
                faults[name] = error
                continue
            limits = [limit for limit in LIMITS.get(name, ()) if limit.patch not in patches]
            outcome[name] = next((limit.reason for limit in limits if re.search(limit.pattern, fault)), "")
            if fault and not outcome[name]:
                faults[name] = unanswered(name, fault)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)  # at Ctrl-C the server is ended, and with it the requests
    if faults:
        (_, first), *others = faults.items()
        further = f"{FURTHER_FAILURES}{', '.join(name for name, _ in others)}" if others else ""
        raise ServerError(first.what, f"{first.why}{further}", first.fix, code=first.code) from first
    return outcome


def describe(outcome: Mapping[str, str]) -> str:
    """Return the result of `prove` as one line."""
    proved = ", ".join(name for name, limit in sorted(outcome.items()) if not limit)
    limits = ", ".join(f"{name} ({limit})" for name, limit in sorted(outcome.items()) if limit)
    return f"proved: {proved}" + (f"; known limit: {limits}" if limits else "")


def fault_of(name: str, endpoint: Endpoint, timeout: float, *, added: Mapping[str, Any] | None = None) -> str:
    """Send one of CALLS and return what is wrong with its answer. Raises ServerError without one.

    With `added`, for a family with another vocabulary, no token is forced, and chats have these keys too.
    """
    call = CALLS[name]
    if added is not None:
        body = {key: value for key, value in call.body.items() if key != BIAS}
        if body.get("max_tokens", 0) > CHAT_TOKENS:
            body["max_tokens"] *= 2  # another vocabulary may have shorter tokens
        call = replace(call, body={**body, **(added if call.path == CHAT else {})})
    return _fault_of(name, call, endpoint, timeout)


def _fault_of(name: str, call: ProofRequest, endpoint: Endpoint, timeout: float) -> str:
    try:
        return _exchange(call, endpoint, timeout)
    except openai.NO_ANSWER as error:
        raise unanswered(name, repr(error)) from error
    except ServerError as error:
        if call.spelled and BIAS in call.body and re.search(REFUSED_BIAS, error.why):
            tokens = endpoint.tokenize(call.spelled) or ()
            body = {key: value for key, value in call.body.items() if key != BIAS} | {"allowed_token_ids": tokens}
            return _fault_of(name, replace(call, body=body), endpoint, timeout)
        if any(re.search(limit.pattern, error.why) for limit in LIMITS.get(name, ())):
            return error.why
        raise unanswered(name, f"{error.what}: {error.why}") from error


def _exchange(call: ProofRequest, endpoint: Endpoint, timeout: float) -> str:
    body = {"model": endpoint.model, "temperature": 0, **call.body}
    if call.refused:
        response = endpoint.send(call.path, body, timeout)
        error = openai.response_error(response)
        if response.status_code == call.refused:
            return call.fault(error.why)
        if response.is_error:
            raise error
        raise ServerError("it was answered", "the server must refuse it", "./inv logs", code="server.reply")
    if body.get("stream"):
        events: list[Any] = []
        second: Future[Any] | None = None
        with ThreadPoolExecutor(1, "proof") as executor:
            for event in endpoint.events(call.path, body, timeout):
                events.append(event)
                if call.beside is not None and second is None and _streamed_content([event]):
                    second = executor.submit(endpoint.post, call.path, {**body, **call.beside}, timeout)
            if call.beside is None:
                return call.fault(events)
            return call.fault((events, second.result() if second else None))
    answer = endpoint.post(call.path, body, timeout)
    if call.continued is None:
        return call.fault(answer)
    body |= {**call.continued, "previous_response_id": answer["id"]}
    return call.fault([answer, endpoint.post(call.path, body, timeout)])


def unanswered(name: str, why: str) -> ServerError:
    """Return the error for a request, called `name`, that a server should answer and does not."""
    why = f"the request for {name}: {why}"
    return ServerError("the server cannot generate", why, "./inv logs", code="server.reply")


def tool_call_fault(message: Mapping[str, Any], *, begun: bool = False) -> str:
    """Return what is wrong with a chat message that should call TOOL for a city, or with `begun` begin such a call."""
    calls = message.get("tool_calls") or []
    if not calls:
        return f"no tool was called; content is {str(message.get('content'))[:60]!r}"
    function = calls[0]["function"]
    if function["name"] != TOOL["function"]["name"]:
        return f"it called {function['name']!r}, which was not offered"
    if begun:
        return ""
    try:
        arguments = parse_json(function["arguments"], "the arguments")
    except ValueError:
        return f"the arguments are not JSON: {function['arguments'][:80]!r}"
    return "" if isinstance(arguments, dict) and arguments.get("city") else f"the arguments name no city: {arguments!r}"


def _unless(good: object, fault: str) -> str:
    return "" if good else fault


def _message(response: Any) -> Any:
    return response["choices"][0]["message"]


def _completion(response: Any) -> str:
    text, count = response["choices"][0]["text"], response["usage"]["completion_tokens"]
    return _unless(isinstance(text, str) and count == 1, f"text {text!r}, {count} tokens instead of 1")


def _chat(response: Any) -> str:
    role, count = _message(response)["role"], response["usage"]["completion_tokens"]
    return _unless(role == "assistant" and 1 <= count <= CHAT_TOKENS, f"role {role!r}, {count} of {CHAT_TOKENS} tokens")


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
    return _unless(count == 1, f"its {len(choices)} events have {count} ends")


def _streamed_content(events: Iterable[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def _mixed(answers: Any) -> str:
    """Judge both contents without an end token spelled as text, which a small model writes after such a prompt."""
    events, response = answers
    line = _streamed_content(events)
    content = _message(response)["content"] if response else None
    if not line or not content:
        return LOST
    end = re.compile(r"<\|(?:end|return)\|>$")
    try:
        text = parse_json(end.sub("", line), "the content")["text"]
    except (ValueError, TypeError, LookupError):
        text = line
    if text != LINE:
        return f"the answer that was being written is {str(text)[:80]!r} and not {LINE[:20]!r} and so on"
    return _json_fault(end.sub("", content))


def _streamed_messages(events: Any) -> str:
    content = _streamed_content(events)
    return _unless(content == "\n".join(CITIES), f"the messages {CITIES} come as {content!r}")


def _logprobs(values: Iterable[float]) -> str:
    numbers = list(values)
    # vLLM rounds to float32, so the likeliest token, which is nearly certain, may be a little above 0.
    good = numbers and all(-math.inf < number <= 1e-3 for number in numbers)
    return _unless(good, f"the log probabilities are {numbers[:8]}")


def _chat_logprobs(response: Any) -> str:
    entries = response["choices"][0]["logprobs"]["content"]
    return _logprobs(value["logprob"] for entry in entries for value in (entry, *entry["top_logprobs"]))


def _prompt_logprobs(response: Any) -> str:
    _first, *tokens = response["choices"][0]["prompt_logprobs"]  # the first token has none
    return _logprobs(entry["logprob"] for token in tokens for entry in token.values())


def _content_logprobs(response: Any) -> str:
    choice = response["choices"][0]
    tokens = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    return _unless(tokens == (choice["message"]["content"] or ""), f"their tokens are {tokens[:60]!r}")


def _whole_schema(response: Any) -> str:
    count = response["usage"]["prompt_tokens"]
    return _unless(count > WHOLE_SCHEMA_TOKENS, f"the prompt has {count} tokens: the tool's schema is lost")


def _names(word: str) -> Callable[[str], str]:
    """Return the check of a refusal that must have `word` in its message."""
    return lambda message: _unless(word in message, f"the refusal does not name the fault: {message[:80]!r}")


def _json(response: Any) -> str:
    choice = response["choices"][0]
    content = choice["message"]["content"]
    return f"content is null (finish_reason {choice['finish_reason']!r})" if content is None else _json_fault(content)


def _json_fault(content: str) -> str:
    try:
        value = parse_json(content, "the content")
    except ValueError:
        return f"the content is not JSON: {content[:80]!r}"
    valid = isinstance(value, dict) and list(value) == ["city"] and value["city"] in CITIES
    return _unless(valid, f"the content does not follow the schema: {content[:80]!r}")


def _stop(response: Any) -> str:
    content = _message(response)["content"]
    if content is None or '"city' in content:  # vLLM before 0.32.0 loses it, or leaves the stop string in
        return f"the content does not end before the stop string: {content!r:.200}"
    return _unless(content.strip() == "{", f"the content is {content[:60]!r}")


def _city(response: Any) -> str:
    message = _message(response)
    if message.get("tool_calls"):
        return "a tool was called"
    return _unless(message["content"] == CITIES[0], f"the content is {message['content']!r} and not {CITIES[0]!r}")


def _cut_call(response: Any) -> str:
    arguments = _message(response)["tool_calls"][0]["function"]["arguments"]
    return _unless(arguments.strip() == "{", f"the arguments {arguments[:60]!r} do not end before the stop string")


def _messages_only(response: Any) -> str:
    types = [item["type"] for item in response["output"]]
    return _unless(set(types) == {"message"}, f"its items are {types} instead of messages")


def _json_response(response: Any) -> str:
    return _messages_only(response) or _json_fault(response["output"][0]["content"][0]["text"])


def _unknown_response(message: str) -> str:
    good = "one of the last" in message and "`input`" in message
    return message if STORE in message else _unless(good, f"the refusal does not say what to do: {message[:80]!r}")


def _continued(responses: Any) -> str:
    first, second = (response["usage"]["input_tokens"] for response in responses)
    fault = f"the first response's instructions are still there: {first}, then {second} tokens"
    return _unless(second < first, fault)


def _failed_response(events: Any) -> str:
    last = events[-1]["type"]
    if last != "response.failed":
        return f"its last event is {last!r} and not 'response.failed'"
    return _names("nonsense")(events[-1]["response"]["error"]["message"])


def _white_space(response: Any) -> str:
    is_whole = response["choices"][0]["finish_reason"] == "stop"
    return _unless(is_whole, f"it does not end within {SPACE_TOKENS} tokens")


def _schema(**properties: Any) -> dict[str, Any]:
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


def _format(schema: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def _tag(text: str) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "const_string", "value": text}}


def _biased(*tokens: str) -> dict[str, int]:
    return dict.fromkeys(tokens, MAX_BIAS)


COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PLACE = _schema(city={"type": "string", "enum": CITIES})
PLACE_FORMAT = _format(PLACE, strict=True)
# Without `strict` vLLM's grammar accepts any JSON as arguments.
STRICT_TOOL = {**TOOL, "function": {**TOOL["function"], "parameters": PLACE, "strict": True}}
REFERRING_SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "$defs": {"City": {"enum": [f"city {number}" for number in range(100)]}},
}
REFERRING_TOOL = {"type": "function", "function": {"name": "visit", "parameters": REFERRING_SCHEMA}}
NONSENSE = {"type": "nonsense"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
WRITE = _biased(FINAL, *SPECIAL)  # the model begins a final message and writes text into it, also special tokens
CALL_AS_TEXT = f"<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>{CITIES[0]}"
OUTPUT_OF_PARTS = [
    {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Rain"}]},
]


def _chat_request(fault: Callable[[Any], str], tokens: int = TOKENS, **more: Any) -> ProofRequest:
    return ProofRequest(CHAT, {"messages": ASK, "max_tokens": tokens, **more}, fault)


def _json_request(fault: Callable[[Any], str], tokens: int = TOKENS, **more: Any) -> ProofRequest:
    forced = {"logit_bias": _biased(FINAL, END), "response_format": PLACE_FORMAT}
    spelled = "" if "logit_bias" in more else JSON_ANSWER.format('{"city": "Paris"}')  # another bias leads elsewhere
    return replace(_chat_request(fault, tokens, **{**forced, **more}), spelled=spelled)


def _tool_request(fault: Callable[[Any], str], tokens: int = TOKENS, **more: Any) -> ProofRequest:
    forced = {"logit_bias": _biased(TO), "tools": [STRICT_TOOL], "tool_choice": "required"}
    spelled = SPELLED_CALL if "tools" not in more else ""  # another tool takes other arguments
    return replace(_chat_request(fault, tokens, **{**forced, **more}), spelled=spelled)


def _text_request(fault: Callable[[Any], str], text: str, **more: Any) -> ProofRequest:
    request = _chat_request(fault, logit_bias=WRITE, response_format=_tag(text), **more)
    return replace(request, spelled=ANSWER.format(text))


def _completion_request(fault: Callable[[Any], str], prompt: str, tokens: int = 1, **more: Any) -> ProofRequest:
    return ProofRequest(COMPLETIONS, {"prompt": prompt, "max_tokens": tokens, **more}, fault)


def _response_request(fault: Callable[[Any], str], tokens: int = TOKENS, **more: Any) -> ProofRequest:
    return ProofRequest(RESPONSES, {"input": ASK[0]["content"], "max_output_tokens": tokens, **more}, fault)


def _refused_chat(word: str, **more: Any) -> ProofRequest:
    """Return a chat that the server must refuse with `word` in its message."""
    return replace(_chat_request(_names(word), 1, **more), refused=HTTPStatus.BAD_REQUEST)


REQUESTS = {
    "a completion": _completion_request(_completion, "Hello"),
    "a streamed completion": _completion_request(_streamed_completion, "Hello", 2, stream=True),
    "a chat": _chat_request(_chat, CHAT_TOKENS),
    "a streamed chat": _chat_request(_streamed_chat, CHAT_TOKENS, stream=True),
    "log probabilities": _json_request(_chat_logprobs, logprobs=True, top_logprobs=1),
    "log probabilities of the prompt": _completion_request(_prompt_logprobs, "One two three", prompt_logprobs=1),
    "a JSON answer": _json_request(_json),
    # Users report illegal memory accesses of CUDA graphs in steps that have both (docs/hardware.md).
    "a long prompt beside an answer": replace(
        _json_request(
            _mixed,
            4 * TOKENS,
            stream=True,
            response_format=_format(_schema(text={"type": "string", "enum": [LINE]}), strict=True),
        ),
        spelled=JSON_ANSWER.format(json.dumps({"text": LINE, "city": CITIES[0]})),
        beside={
            "messages": [{"role": "user", "content": PROSE}, *ASK],
            "max_tokens": TOKENS,
            "stream": False,
            "response_format": PLACE_FORMAT,
        },
    ),
    "a stop string": _json_request(_stop, stop=['"city']),
    "a tool call": _tool_request(lambda response: tool_call_fault(_message(response))),
}
# Canary → the patch of vLLM's queues without which it fails.
PATCHES = {
    "a stop string in a tool call": "0006-leave-stop-strings-out-of-harmony-text.patch",
    "a JSON answer with a content type": "0004-read-final-json-as-content-type.patch",
    "a JSON response": "0004-read-final-json-as-content-type.patch",
    "a malformed header": "0005-recover-malformed-harmony-headers.patch",
    "a forbidden call": "0007-give-forbidden-harmony-calls-as-content.patch",
    "a forbidden call in a response": "0007-give-forbidden-harmony-calls-as-content.patch",
    "a refused schema": "0008-name-the-fault-of-a-structural-tag.patch",
    "a refused image": "0009-refuse-harmony-content-that-is-not-text.patch",
    "limited white space": "0010-limit-white-space-in-harmony-json.patch",
    "an unknown response": "0011-bound-the-store-of-responses.patch",
    "a continued response": "0012-take-instructions-and-tools-of-the-continuing-request.patch",
    "a response that fails": "0014-end-responses-that-fail.patch",
    "two streamed messages": "0015-separate-streamed-harmony-messages.patch",
    "a whole tool schema": "0016-render-whole-tool-schemas.patch",
    "a call beside a schema": "0017-leave-calls-free-beside-a-format.patch",
    "a removed field": "0018-name-what-is-wrong-with-a-request.patch",
    "a bounded pattern": "0030-compile-grammars-apart.patch",
    "log probabilities of the content": "0019-give-the-content-its-tokens.patch",
    "an output of parts": "0020-take-what-agents-send-to-responses.patch",
    "a server tool": "0021-read-anthropic-requests-for-harmony.patch",
}
CANARIES = {
    "a stop string in a tool call": _tool_request(_cut_call, stop=['"city']),
    "a JSON answer with a content type": _json_request(_json, logit_bias=_biased(FINAL, JSON, END)),
    "a JSON response": _response_request(
        _json_response,
        logit_bias=_biased(FINAL, JSON, END),
        text={"format": {"type": "json_schema", "name": "place", "strict": True, "schema": PLACE}},
    ),
    "a malformed header": _text_request(_city, f"<|end|><|channel|>final<|message|>{CITIES[0]}"),
    "a forbidden call": _text_request(_city, CALL_AS_TEXT, tools=[TOOL], tool_choice="none"),
    "a forbidden call in a response": _response_request(
        _messages_only,
        tools=[{"type": "function", **TOOL["function"]}],
        tool_choice="none",
        logit_bias=WRITE,
        structured_outputs={"structural_tag": json.dumps(_tag(CALL_AS_TEXT))},
    ),
    "a refused schema": _refused_chat("nonsense", response_format=_format(NONSENSE)),
    "a refused image": _refused_chat("text only", messages=[{"role": "user", "content": [IMAGE]}]),
    "limited white space": _json_request(_white_space, SPACE_TOKENS, logit_bias=_biased(FINAL, BRACE, SPACES)),
    "an unknown response": replace(
        _response_request(_unknown_response, 1, previous_response_id="resp_0"), refused=HTTPStatus.NOT_FOUND
    ),
    "a continued response": replace(
        _response_request(_continued, 1, instructions="Be brief. " * 20),
        continued={"input": "Go on.", "instructions": None},
    ),
    "a response that fails": _response_request(
        _failed_response,
        1,
        background=True,
        stream=True,
        text={"format": {"type": "json_schema", "name": "x", "schema": NONSENSE}},
    ),
    "two streamed messages": _text_request(
        _streamed_messages, "<|end|><|start|>assistant<|channel|>final<|message|>".join(CITIES), stream=True
    ),
    "a whole tool schema": _chat_request(_whole_schema, 1, tools=[REFERRING_TOOL]),
    "a call beside a schema": _tool_request(
        lambda response: tool_call_fault(_message(response), begun=True),
        CALL_TOKENS,
        tools=[TOOL],
        tool_choice="auto",
        response_format=PLACE_FORMAT,
    ),
    "a removed field": _refused_chat("guided_json", guided_json=PLACE),
    "a bounded pattern": _chat_request(
        _chat, 1, response_format=_format({"type": "string", "pattern": "^[a-z]{0,300}$"})
    ),
    "log probabilities of the content": _json_request(_content_logprobs, logprobs=True),
    "an output of parts": _response_request(
        lambda response: _unless("output" in response, "it is no response"), 1, input=OUTPUT_OF_PARTS
    ),
    "a server tool": ProofRequest(
        "/v1/messages/count_tokens",
        {"messages": ASK, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        _names("'web_search'"),
        refused=HTTPStatus.BAD_REQUEST,
    ),
}
CALLS: Mapping[str, ProofRequest] = {
    **REQUESTS,
    **{name: replace(call, patch=PATCHES[name]) for name, call in CANARIES.items()},
}
STORE_LIMIT = Limit(STORE, f"previous_response_id is off, {STORE}=1 turns it on")
LOST_LIMIT = Limit(re.escape(LOST), "content is lost, vLLM #41902", PATCHES["a JSON answer with a content type"])
LONG_LIMIT = Limit("maximum context length|maximum model length|max_model_len", "--max-model-len leaves no room for it")
# A wrong path or model is refused with another message.
LOST_RESPONSE_LIMIT = Limit(
    r"Response with id '\S+' not found",
    "--api-server-count or a small VLLM_RESPONSES_API_STORE_MAX_ENTRIES loses responses",
)
# Patches of the queues for 0.32.0 and 0.33.0 fix two of them; the vLLM of the stack ngc-25.12 is older. Whether
# responses are stored, and in how many processes, is the user's choice.
_LIMITS: Mapping[str, Sequence[Limit]] = {
    "a JSON answer": [LOST_LIMIT],
    "a long prompt beside an answer": [LONG_LIMIT, LOST_LIMIT],
    "a stop string": [
        Limit("does not end before", "it stays in the answer, vLLM #52599", PATCHES["a stop string in a tool call"])
    ],
    "an unknown response": [STORE_LIMIT],
    "a continued response": [STORE_LIMIT, LOST_RESPONSE_LIMIT],
    "a response that fails": [STORE_LIMIT],
}
# A server with a draft refuses every bias: requests without a spelled answer are not tested, and are listed.
DRAFT_LIMIT = Limit(REFUSED_BIAS, "not proved, vLLM takes no logit_bias beside a draft")
LIMITS: Mapping[str, Sequence[Limit]] = {
    name: [*_LIMITS.get(name, ()), *([DRAFT_LIMIT] if BIAS in call.body else ())] for name, call in CALLS.items()
}
