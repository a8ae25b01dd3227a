"""The anthropic package: /v1/messages with tools, thinking and structured output."""

import anthropic
from conversations import ANSWER, CALL, DONE, JSON, KEY, SCHEMA, THOUGHT, Weather, equal, feature, main, raises

TOOL = {"name": "weather", "description": "The weather now.", "input_schema": SCHEMA}
FORMAT = {"format": {"type": "json_schema", "schema": Weather.model_json_schema()}}


def ask(url, model, cue, **options):
    client = anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0)
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
    client = anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0)
    messages = [{"role": "user", "content": ANSWER}]
    with client.messages.stream(model=model, messages=messages, max_tokens=2000) as stream:
        equal("".join(stream.text_stream), DONE)


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
