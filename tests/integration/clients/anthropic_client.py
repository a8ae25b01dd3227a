"""The anthropic package: /v1/messages with tools, thinking and structured output."""

import json

import anthropic
import conversations as c
from conversations import ANSWER, CALL, DONE, JSON, OSLO_CALL, WEATHER, Weather, equal, feature, raises

TOOL = {"name": "weather", "description": "The weather now.", "input_schema": c.SCHEMA}
FORMAT = {"format": {"type": "json_schema", "schema": Weather.model_json_schema()}}
client = anthropic.Anthropic(base_url=c.URL, api_key=c.KEY, max_retries=0)


def user(content):
    return [{"role": "user", "content": content}]


def ask(cue, **options):
    return client.messages.create(model=c.MODEL, **{"messages": user(cue), "max_tokens": 2000, **options})


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


def calls(message):
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def streaming(cue, **options):
    return client.messages.stream(model=c.MODEL, messages=user(cue), max_tokens=2000, **options)


@feature("chat")
def _():
    message = ask(ANSWER)
    equal((text(message), message.content[0].thinking, message.stop_reason), (DONE, c.THOUGHT, "end_turn"))


@feature("stream")
def _():
    with streaming(ANSWER) as stream:
        equal("".join(stream.text_stream), DONE)


@feature("tools: streamed")
def _():
    with streaming(CALL, tools=[TOOL]) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        equal((json.loads("".join(pieces)), calls(stream.get_final_message())), (OSLO_CALL[1], [OSLO_CALL]))


@feature("system")
def _():
    blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": f"Say {ANSWER}."}]
    for system in (blocks, f"Be brief. Say {ANSWER}."):
        equal(text(ask("Hello.", system=system)), DONE)


@feature("stop_sequences")
def _():
    message = ask(c.TOY, stop_sequences=["book", "toy"])
    equal((text(message), message.stop_reason, message.stop_sequence), ("I have a ", "stop_sequence", "toy"))


@feature("errors")
def _():
    """Each error has Anthropic's format and a reason, and raises the client's own exception; also for an image."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    request = {"model": c.MODEL, "max_tokens": 9, "messages": user(ANSWER)}
    cases = [
        (anthropic.BadRequestError, client, {**request, "messages": user([image])}, "image"),
        (anthropic.BadRequestError, client, {**request, "messages": user("and so on " * 2000)}, "context length"),
        (anthropic.NotFoundError, client, {**request, "model": "absent"}, "absent"),
        (anthropic.AuthenticationError, client.with_options(api_key="wrong"), request, "API key"),
    ]
    for error, asked, fields, reason in cases:
        for stream in (False, True):
            try:
                asked.messages.create(**fields, stream=stream)
                raise AssertionError(f"no error: {reason}")
            except error as caught:
                equal((caught.body["type"], reason in caught.body["error"]["message"]), ("error", True))


@feature("count_tokens")
def _():
    fields = {"messages": user(ANSWER), "system": "Be brief.", "tools": [TOOL]}
    equal(client.messages.count_tokens(model=c.MODEL, **fields).input_tokens, ask("", **fields).usage.input_tokens)


@feature("tools, two turns")
def _():
    first = ask(CALL, tools=[TOOL])
    equal((calls(first), first.stop_reason), ([OSLO_CALL], "tool_use"))
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": f"7 degrees, says the {ANSWER}"}
    turns = [*user(CALL), {"role": "assistant", "content": first.content}, *user([result])]
    equal(text(ask("", messages=turns, tools=[TOOL])), DONE)


@feature("tools: none")
def _():
    message = ask(CALL, tools=[TOOL], tool_choice={"type": "none"})
    equal((calls(message), text(message)), ([], ""))


@feature("thinking: enabled, adaptive, disabled")
def _():
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
        equal(text(ask(ANSWER, thinking=thinking)), DONE)


@feature("tools with structured output")
def _():
    options = {"tools": [TOOL], "output_config": FORMAT}
    equal(calls(ask(CALL, **options)), [OSLO_CALL])
    equal(Weather.model_validate_json(text(ask(JSON, **options))), WEATHER)


PREFILL = [*user(ANSWER), {"role": "assistant", "content": "All"}]
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
c.main({
    "prefill": lambda: equal(text(ask("", messages=PREFILL)), " done."),
    "structured output": lambda: equal(
        Weather.model_validate_json(text(ask(JSON, output_config=FORMAT))), WEATHER),
    "server tools": lambda: raises(anthropic.BadRequestError, lambda: ask(ANSWER, tools=[SEARCH])),
})  # fmt: skip
