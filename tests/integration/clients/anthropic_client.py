"""The anthropic package: /v1/messages with tools, thinking and structured output."""

import json

import anthropic
from conversations import ANSWER, CALL, DONE, JSON, KEY, SCHEMA, THOUGHT, TOY, Weather, equal, feature, main, raises

OSLO = {"city": "Oslo"}
TOOL = {"name": "weather", "description": "The weather now.", "input_schema": SCHEMA}
FORMAT = {"format": {"type": "json_schema", "schema": Weather.model_json_schema()}}


def ask(url, model, cue, **options):
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    options = {"messages": [{"role": "user", "content": cue}], "max_tokens": 2000, **options}
    return client.messages.create(model=model, **options)


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


def calls(message):
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


@feature("chat")
def _(url, model):
    message = ask(url, model, ANSWER)
    equal((text(message), message.content[0].thinking, message.stop_reason), (DONE, THOUGHT, "end_turn"))


@feature("stream")
def _(url, model):
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": ANSWER}]
    with client.messages.stream(model=model, messages=messages, max_tokens=2000) as stream:
        equal("".join(stream.text_stream), DONE)


@feature("tools: streamed")
def _(url, model):
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": CALL}]
    with client.messages.stream(model=model, messages=messages, max_tokens=2000, tools=[TOOL]) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        equal((json.loads("".join(pieces)), calls(stream.get_final_message())), (OSLO, [("weather", OSLO)]))


@feature("system")
def _(url, model):
    blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": f"Say {ANSWER}."}]
    messages = [{"role": "user", "content": "Hello."}]
    for system in (blocks, f"Be brief. Say {ANSWER}."):
        equal(text(ask(url, model, "", messages=messages, system=system)), DONE)


@feature("stop_sequences")
def _(url, model):
    message = ask(url, model, TOY, stop_sequences=["book", "toy"])
    equal((text(message), message.stop_reason, message.stop_sequence), ("I have a ", "stop_sequence", "toy"))


@feature("errors")
def _(url, model):
    """Each error has Anthropic's format and a reason, and raises the client's own exception; also for an image."""
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    stranger = client.with_options(api_key="wrong")
    request = {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": ANSWER}]}
    long = [{"role": "user", "content": "and so on " * 2000}]
    cases = [
        (anthropic.BadRequestError, client, {**request, "messages": [{"role": "user", "content": [image]}]}, "image"),
        (anthropic.BadRequestError, client, {**request, "messages": long}, "context length"),
        (anthropic.NotFoundError, client, {**request, "model": "absent"}, "absent"),
        (anthropic.AuthenticationError, stranger, request, "API key"),
    ]
    for error, asked, fields, reason in cases:
        for stream in (False, True):
            try:
                asked.messages.create(**fields, stream=stream)
                raise AssertionError(f"no error: {reason}")
            except error as caught:
                equal((caught.body["type"], reason in caught.body["error"]["message"]), ("error", True))


@feature("count_tokens")
def _(url, model):
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    fields = {"messages": [{"role": "user", "content": ANSWER}], "system": "Be brief.", "tools": [TOOL]}
    count = client.messages.count_tokens(model=model, **fields).input_tokens
    equal(count, ask(url, model, "", **fields).usage.input_tokens)


@feature("tools, two turns")
def _(url, model):
    first = ask(url, model, CALL, tools=[TOOL])
    equal((calls(first), first.stop_reason), ([("weather", {"city": "Oslo"})], "tool_use"))
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": f"7 degrees, says the {ANSWER}"}
    turns = [
        {"role": "user", "content": CALL},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    equal(text(ask(url, model, "", messages=turns, tools=[TOOL])), DONE)


@feature("tools: none")
def _(url, model):
    message = ask(url, model, CALL, tools=[TOOL], tool_choice={"type": "none"})
    equal((calls(message), text(message)), ([], ""))


@feature("thinking: enabled, adaptive, disabled")
def _(url, model):
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
        equal(text(ask(url, model, ANSWER, thinking=thinking)), DONE)


@feature("prefill")
def _(url, model):
    messages = [{"role": "user", "content": ANSWER}, {"role": "assistant", "content": "All"}]
    equal(text(ask(url, model, "", messages=messages)), " done.")


@feature("structured output")
def _(url, model):
    message = ask(url, model, JSON, output_config=FORMAT)
    equal(Weather.model_validate_json(text(message)), Weather(city="Oslo", degrees=7))


@feature("tools with structured output")
def _(url, model):
    options = {"tools": [TOOL], "output_config": FORMAT}
    equal(calls(ask(url, model, CALL, **options)), [("weather", {"city": "Oslo"})])
    equal(Weather.model_validate_json(text(ask(url, model, JSON, **options))), Weather(city="Oslo", degrees=7))


@feature("server tools")
def _(url, model):
    tool = {"type": "web_search_20250305", "name": "web_search"}
    raises(anthropic.BadRequestError, lambda: ask(url, model, ANSWER, tools=[tool]))


main()
