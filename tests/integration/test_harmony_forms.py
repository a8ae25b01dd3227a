"""The answers of vLLM's API to each form of Harmony output, with real vLLM, the scripted checkpoint and openai.

Patches 0004 to 0012 and 0014 to 0021 of the queue correct these answers (docs/reference/answers.md).
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.models import harmony
from sparkforge.serve import proof

pytestmark = pytest.mark.integration
MODEL = "scripted"
JSON = '{"city": "Oslo"}'
# Name → what the model writes after `<|start|>assistant`.
FORMS = {
    "final": "<|channel|>final<|message|>I have a toy and a book.<|return|>",
    "final json": f"<|channel|>final json<|message|>{JSON}<|return|>",
    "final constrain": f"<|channel|>final <|constrain|>json<|message|>{JSON}<|return|>",
    "two messages": "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
    "<|channel|>final<|message|>All done.<|return|>",
    "two finals": "<|channel|>final<|message|>First part.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Second part.<|return|>",
    "commentary, then final": "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    "<|channel|>final<|message|>All done.<|return|>",
    "two thoughts": "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
    "<|channel|>analysis<|message|>It is clear.<|end|><|start|>assistant<|channel|>final<|message|>All done.<|return|>",
    "no start": "<|channel|>analysis<|message|>Let me think.<|end|>assistant"
    "<|channel|>final<|message|>All done.<|return|>",
    "text first": "Plain words without a header.<|return|>",
    "message first": "<|message|>Words without a channel.<|return|>",
    "start first": "<|start|>assistant<|channel|>final<|message|>All done.<|return|>",
    "commentary, then a call": "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>",
    "recipient in the role": f" to=functions.weather<|channel|>commentary json<|message|>{JSON}<|call|>",
    "recipient in the channel": f"<|channel|>commentary to=functions.weather json<|message|>{JSON}<|call|>",
    "recipient in both": f" to=functions.weather<|channel|>commentary to=functions.weather json<|message|>"
    f"{JSON}<|call|>",
    "analysis, then JSON": "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
    f"<|channel|>final json<|message|>{JSON}<|return|>",
    "unknown channel": "<|channel|>musings<|message|>Let me see.<|end|><|start|>assistant"
    "<|channel|>final<|message|>All done.<|return|>",
    "ends in a channel": "<|channel|>fin",
    "ends before a channel": "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant",
    "ends in a recipient": "<|channel|>commentary to=functions.wea",
    "white space": "<|channel|>final json<|message|>{" + " " * 40 + '"city": "Oslo"}<|return|>',
    "channel without a name": "<|channel|><|message|>All done.<|return|>",
    "two channels": f"<|channel|>commentary<|channel|>commentary to=functions.weather json<|message|>{JSON}<|call|>",
    "a name as role": "<|channel|>analysis<|message|>Let me think.<|end|><|start|>final<|message|>All done.<|return|>",
    "role twice": "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistantassistant"
    "<|channel|>final<|message|>All done.<|return|>",
    "start twice": "<|channel|>analysis<|message|>Let me think.<|end|><|start|><|start|>assistant"
    "<|channel|>final<|message|>All done.<|return|>",
    "special token in a message": "<|channel|>analysis<|message|>Let me think.<|channel|>final<|message|>"
    "All done.<|return|>",
    "a tool of the model's own": '<|channel|>analysis to=browser.search code<|message|>{"query": "Oslo"}<|call|>',
    "code": "<|channel|>analysis to=python code<|message|>print(7)<|call|>",
    "letters of several bytes": "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Grüße 🦜 heim.<|return|>",
}
# Words that are one token, at the start of a text and after a space.
CUES = [
    "cat", "dog", "bird", "fish", "horse", "wolf", "bear", "lion", "duck", "fox", "rabbit", "snake", "mouse", "cow",
    "pig", "frog", "sun", "moon", "star", "rain", "snow", "wind", "tree", "rose", "leaf", "hill", "lake",
    "ship", "road", "door",
]  # fmt: skip
CUE_OF = dict(zip(FORMS, CUES, strict=True))
SCRIPTS = {CUE_OF[form]: text for form, text in FORMS.items()}  # what conftest.py's server writes
TOKENS = 100
SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
# Further fields of a request.
REQUESTS = {
    "plain": {},
    "stop": {"stop": ["toy", "think"]},
    "schema": {"response_format": FORMAT},
    "object": {"response_format": {"type": "json_object"}},
    "auto": {"tools": [TOOL]},
    "required": {"tools": [TOOL], "tool_choice": "required"},
    "named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "none": {"tools": [TOOL], "tool_choice": "none"},
    "stop in a call": {"tools": [TOOL], "stop": ["Oslo"]},
    "auto, schema": {"tools": [TOOL], "response_format": FORMAT},
    "auto, object": {"tools": [TOOL], "response_format": {"type": "json_object"}},
    "no end": {"extra_body": {"ignore_eos": True}},
}


class Answer(NamedTuple):
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"


CALL = (("weather", JSON),)
CUT = JSON.partition("Oslo")[0]
DONE, THOUGHT, LOOK_UP = "All done.", "Let me think.", "I look it up."
CALLED = Answer(calls=CALL, finish="tool_calls")
# Form, request → the right answer, streamed or not.
RIGHT = {
    ("final", "plain"): Answer("I have a toy and a book."),
    ("final json", "plain"): Answer(JSON),
    ("final constrain", "plain"): Answer(JSON),
    ("two messages", "plain"): Answer(DONE, THOUGHT),
    ("two finals", "plain"): Answer("First part.\nSecond part."),
    ("two finals", "auto"): Answer("First part.\nSecond part."),
    ("commentary, then final", "plain"): Answer(f"{LOOK_UP}\n{DONE}"),
    ("two thoughts", "plain"): Answer(DONE, f"{THOUGHT}\nIt is clear."),
    ("no start", "plain"): Answer(DONE, THOUGHT),
    ("text first", "plain"): Answer("Plain words without a header."),
    ("message first", "plain"): Answer("Words without a channel."),
    ("start first", "plain"): Answer(DONE),
    ("unknown channel", "plain"): Answer(DONE),
    ("special token in a message", "plain"): Answer(DONE, THOUGHT),
    ("channel without a name", "plain"): Answer(DONE),
    ("a name as role", "plain"): Answer(DONE, THOUGHT),
    ("role twice", "plain"): Answer(DONE, THOUGHT),
    ("start twice", "plain"): Answer(DONE, THOUGHT),
    ("final", "no end"): Answer("I have a toy and a book.", finish="length"),
    ("ends in a channel", "plain"): Answer(),
    ("ends before a channel", "plain"): Answer("", THOUGHT),
    ("ends in a recipient", "auto"): Answer(),
    ("commentary, then a call", "auto"): Answer(LOOK_UP, calls=CALL, finish="tool_calls"),
    ("recipient in the role", "auto"): CALLED,
    ("recipient in the channel", "auto"): CALLED,
    ("recipient in both", "auto"): CALLED,
    ("two channels", "auto"): CALLED,
    ("final", "auto"): Answer("I have a toy and a book."),
    ("final json", "auto"): Answer(JSON),
    ("recipient in the role", "required"): CALLED,
    ("recipient in the channel", "required"): CALLED,
    ("commentary, then a call", "required"): Answer(LOOK_UP, calls=CALL, finish="tool_calls"),
    ("recipient in the role", "named"): Answer(calls=CALL),
    ("recipient in the channel", "named"): Answer(calls=CALL),
    ("final", "stop"): Answer("I have a "),
    ("two messages", "stop"): Answer("", "Let me "),
    ("recipient in the channel", "stop in a call"): Answer(calls=(("weather", CUT),), finish="tool_calls"),
    ("recipient in the role", "stop in a call"): Answer(calls=(("weather", CUT),), finish="tool_calls"),
    ("final json", "schema"): Answer(JSON),
    ("final json", "object"): Answer(JSON),
    ("final constrain", "schema"): Answer(JSON),
    ("final constrain", "object"): Answer(JSON),
    ("analysis, then JSON", "schema"): Answer(JSON, THOUGHT),
    ("recipient in the role", "auto, schema"): CALLED,
    ("recipient in the channel", "auto, schema"): CALLED,
    ("recipient in the channel", "auto, object"): CALLED,
    ("commentary, then a call", "auto, schema"): Answer(LOOK_UP, calls=CALL, finish="tool_calls"),
    ("final constrain", "auto, schema"): Answer(JSON),
    ("analysis, then JSON", "auto, schema"): Answer(JSON, THOUGHT),
    ("final json", "auto, object"): Answer(JSON),
    ("letters of several bytes", "plain"): Answer("Grüße 🦜 heim.", THOUGHT),
    ("final", "none"): Answer("I have a toy and a book."),
    ("recipient in the channel", "none"): Answer(JSON),
    ("recipient in the role", "none"): Answer(JSON),
}


@pytest.fixture(scope="module")
def served(scripted_server):
    return openai.OpenAI(base_url=f"{scripted_server.url}/v1", api_key=scripted_server.key, max_retries=0)


def whole(served, form, request):
    messages = [{"role": "user", "content": CUE_OF[form]}]
    response = served.chat.completions.create(model=MODEL, messages=messages, max_tokens=TOKENS, **REQUESTS[request])
    (choice,) = response.choices
    calls = tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or ())
    return Answer(choice.message.content or "", choice.message.reasoning or "", calls, choice.finish_reason)


def streamed(served, form, request):
    messages = [{"role": "user", "content": CUE_OF[form]}]
    content, reasoning, calls, finish = "", "", {}, ""
    for event in served.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=TOKENS, stream=True, **REQUESTS[request]
    ):
        for choice in event.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
            finish = choice.finish_reason or finish
    return Answer(content, reasoning, tuple(calls.values()), finish)


@pytest.mark.parametrize("ask", [whole, streamed], ids=["whole", "streamed"])
@pytest.mark.parametrize(("form", "request_name"), RIGHT, ids=[", ".join(key) for key in RIGHT])
def test_a_client_gets_the_right_answer(served, form, request_name, ask):
    assert ask(served, form, request_name) == RIGHT[form, request_name]


def test_every_form_is_asked_and_the_page_has_their_number():
    assert {form for form, _ in RIGHT} | set(RESPONSES) | {"white space", *UNOFFERED} == set(FORMS)
    page = " ".join((ROOT / "docs/reference/clients.md").read_text(encoding="utf-8").split())
    forms = f"{len(FORMS)} forms of Harmony in {len(RIGHT)} requests of Chat Completions, each whole and streamed"
    assert f"{forms}, and in {len(RESPONSES)} of the Responses API." in page


# The scripted model prefers its script by more than the API's largest bias, so no bias can make it write white space or
# begin a call. `./inv up` tests both with the trained model (test_road.py).
BIASED = {"limited white space", "a stop string in a tool call", "a call beside a schema"}
CANARIES = [name for name, call in proof.CALLS.items() if call.patch and name not in BIASED]


@pytest.mark.parametrize("name", CANARIES)
def test_the_canary_of_a_patch_finds_no_fault(scripted_server, name):
    """The canary works with any model, because its request forces the output."""
    assert proof.fault_of(name, Endpoint(scripted_server.url, MODEL, key=scripted_server.key), 300.0) == ""


def test_white_space_ends(served):
    """The script has 40 consecutive spaces; 32 are allowed. Off its script the model follows only the grammar."""
    schema = {**SCHEMA, "properties": {"city": {"enum": ["Oslo"]}}}
    response = served.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": CUE_OF["white space"]}],
        max_tokens=300,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    (choice,) = response.choices
    value, _end = json.JSONDecoder().raw_decode(choice.message.content)  # the text `<|end|>` may follow
    assert value == {"city": "Oslo"}
    assert not re.search(r"\s{33}", choice.message.content)
    assert choice.finish_reason == "stop"


def test_a_refusal_names_what_is_wrong_with_the_schema(served):
    wrong = {"type": "json_schema", "json_schema": {"name": "place", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match=r"Unsupported type .*nonsense"):
        served.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "cat"}], max_tokens=TOKENS, response_format=wrong
        )


def test_an_image_is_refused(served):
    text, image = {"type": "text", "text": CUE_OF["final"]}, "data:image/png;base64,iVBORw0KGgo="
    for part in ({"type": "image_url", "image_url": {"url": image}}, {"type": "file", "file": {"file_data": image}}):
        with pytest.raises(openai.BadRequestError, match="takes text only"):
            served.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": [text, part]}], max_tokens=TOKENS
            )
    parts = [{"type": "input_text", "text": "cat"}, {"type": "input_image", "image_url": image, "detail": "auto"}]
    with pytest.raises(openai.BadRequestError, match="takes text only"):
        served.responses.create(model=MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=TOKENS)


RESPONSES = {
    "final": ["message"], "two messages": ["reasoning", "message"], "two finals": ["message", "message"],
    "commentary, then final": ["message", "message"], "final constrain": ["message"], "final json": ["message"],
    "start first": ["message"], "message first": ["message"], "text first": ["message"],
    "no start": ["reasoning", "message"], "unknown channel": ["message"], "recipient in the role": ["function_call"],
    "commentary, then a call": ["message", "function_call"], "recipient in both": ["function_call"],
    "ends in a channel": [],
}  # fmt: skip


@pytest.mark.parametrize("form", RESPONSES)
def test_the_responses_api_gives_these_items(served, form):
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    response = served.responses.create(model=MODEL, input=CUE_OF[form], max_output_tokens=TOKENS, tools=tools)
    assert [item.type for item in response.output] == RESPONSES[form]


def test_the_responses_api_keeps_to_stop_strings(served):
    def ask(**more):
        return served.responses.create(
            model=MODEL, input=CUE_OF["final"], max_output_tokens=TOKENS, extra_body={"stop": ["toy"]}, **more
        )

    text = RIGHT["final", "stop"].content
    assert ask().output_text == text
    events = list(ask(stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text


RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}


def respond(served, form, **options):
    return served.responses.create(model=MODEL, input=CUE_OF[form], max_output_tokens=TOKENS, **options)


def respond_long(served, **options):
    """Start a response in the background that runs for seconds unless it is cancelled."""
    return served.responses.create(
        model=MODEL, input=CUE_OF["final"], background=True, max_output_tokens=3500, extra_body={"ignore_eos": True},
        **options,
    )  # fmt: skip


def respond_streamed(served, form, **options):
    """Request a stream, check that its deltas add up to the last event's response, and return that response."""
    events = list(respond(served, form, stream=True, **options))
    response = events[-1].response
    deltas = {kind: "".join(event.delta for event in events if event.type == kind) for kind in DELTAS}
    calls = [item.arguments for item in response.output if item.type == "function_call"]
    assert list(deltas.values()) == [response.output_text, "".join(calls)]
    return response


DELTAS = ["response.output_text.delta", "response.function_call_arguments.delta"]


@pytest.mark.parametrize("ask", [respond, respond_streamed])
@pytest.mark.parametrize("form", ["recipient in the channel", "recipient in the role"])
def test_the_responses_api_gives_a_forbidden_call_as_a_message(served, form, ask):
    response = ask(served, form, tools=[RESPONSES_TOOL], tool_choice="none")
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == JSON
    assert response.usage.input_tokens == ask(served, form).usage.input_tokens  # the prompt lists no tool


@pytest.mark.parametrize("ask", [respond, respond_streamed])
def test_the_responses_api_cuts_a_stop_string_off_a_call(served, ask):
    response = ask(served, "recipient in the channel", tools=[RESPONSES_TOOL], extra_body={"stop": ["Oslo"]})
    assert [(item.type, item.arguments) for item in response.output] == [("function_call", CUT)]


@pytest.mark.parametrize("ask", [respond, respond_streamed])
def test_a_response_can_be_continued(served, ask):
    """The second turn continues the first turn's messages, but uses its own instructions and tools."""
    fields = {"instructions": "Speak like a pirate.", "tools": [RESPONSES_TOOL]}
    first = ask(served, "recipient in the channel", **fields)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    shown = {"extra_body": {"enable_response_messages": True}}
    options = {"model": MODEL, "max_output_tokens": TOKENS, **shown}
    text = {"role": "user", "content": CUE_OF["two messages"]}
    second = served.responses.create(
        input=[result, text], previous_response_id=first.id, instructions="Be brief.", **options
    )
    assert [item.type for item in second.output] == ["reasoning", "message"]
    assert second.output_text == DONE
    prompt = json.dumps(second.input_messages)
    assert "It rains." in prompt
    assert json.dumps(JSON)[1:-1] in prompt
    assert ("Be brief." in prompt, "pirate" in prompt, '"weather"' in prompt) == (True, False, False)
    third = served.responses.create(input=CUE_OF["final"], previous_response_id=second.id, tools=[RESPONSES_TOOL],
                                    **options)  # fmt: skip
    prompt = json.dumps(third.input_messages)
    assert DONE in prompt
    assert ("Be brief." in prompt, '"weather"' in prompt) == (False, True)


INVALID = {"format": {"type": "json_schema", "name": "place", "schema": {"type": "nonsense"}}}


@pytest.mark.parametrize("options", [{}, {"background": True}], ids=["foreground", "background"])
def test_a_stream_that_fails_ends_with_the_error(served, options):
    *_, last = respond(served, "final", stream=True, text=INVALID, timeout=60, **options)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "nonsense" in last.response.error.message
    if options:
        events = served.responses.retrieve(last.response.id, stream=True, starting_after=1, timeout=60)
        assert [event.type for event in events] == ["response.failed"]


def test_every_reader_of_a_cancelled_stream_ends(served):
    def read(id_):
        return [event.type for event in served.responses.retrieve(id_, stream=True, timeout=60)]

    stream = respond_long(served, stream=True, timeout=60)
    created = next(stream)
    with ThreadPoolExecutor() as executor:
        other = executor.submit(read, created.response.id)
        assert served.responses.cancel(created.response.id).status == "cancelled"
        types = [event.type for event in stream]
        assert "response.completed" not in types
        assert other.result() == [created.type, *types]


def test_the_last_responses_are_kept(scripted_server, served):
    """A response that is used again is kept longer. The error for a dropped response gives the reason and a fix."""
    kept, *_rest, lost = (respond(served, "final") for _ in range(2))
    for _ in range(scripted_server.stored_responses):
        assert served.responses.retrieve(kept.id).output_text == kept.output_text
        respond(served, "final")
    for ask in (served.responses.retrieve, lambda id_: respond(served, "final", previous_response_id=id_)):
        with pytest.raises(openai.NotFoundError, match=f"{lost.id}.*not one of the last 3 .*conversation in `input`"):
            ask(lost.id)
    assert respond(served, "final", previous_response_id=kept.id).output_text == RIGHT["final", "plain"].content
    with pytest.raises(openai.NotFoundError, match="No events"):
        list(served.responses.retrieve(kept.id, stream=True))


UNOFFERED = {"a tool of the model's own": "browser.search", "code": "python"}


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["no tools", "others"])
@pytest.mark.parametrize("form", UNOFFERED)
def test_a_call_of_a_tool_that_nobody_offered_is_an_error(served, form, tools):
    """The error names the tool; clients retry it like any server error."""
    messages = [{"role": "user", "content": CUE_OF[form]}]
    options = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, **tools}
    with pytest.raises(openai.InternalServerError, match=UNOFFERED[form]):
        served.chat.completions.create(**options)
    with pytest.raises(openai.APIError, match=UNOFFERED[form]):
        list(served.chat.completions.create(stream=True, **options))


FINAL_SCHEMA = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}


@pytest.mark.parametrize("ask", [respond, respond_streamed])
@pytest.mark.parametrize(("form", "types"), [("recipient in the channel", ["function_call"]),
                                             ("final json", ["message"])])  # fmt: skip
def test_the_responses_api_leaves_calls_free_beside_a_schema(served, form, types, ask):
    response = ask(served, form, tools=[RESPONSES_TOOL], text=FINAL_SCHEMA)
    assert [item.type for item in response.output] == types


@pytest.mark.parametrize("stop", [[], ["toy"]], ids=["whole", "stop"])
@pytest.mark.parametrize("form", ["final", "two messages", "two finals", "letters of several bytes"])
def test_log_probabilities_are_the_contents(served, form, stop):
    messages = [{"role": "user", "content": CUE_OF[form]}]
    options = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "logprobs": True, "stop": stop}
    (choice,) = served.chat.completions.create(top_logprobs=2, **options).choices
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
    events = served.chat.completions.create(stream=True, **options)
    choices = [choice for event in events for choice in event.choices]
    tokens = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert "".join(tokens) == "".join(choice.delta.content or "" for choice in choices)


USER = {"role": "user", "content": CUE_OF["final"]}


CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": JSON}
CUSTOM_ITEM = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"}
PARTS = [{"type": "input_text", "text": "It "}, {"type": "input_text", "text": "rains."}]


@pytest.mark.parametrize("call", [CALL_ITEM, CUSTOM_ITEM], ids=["function", "custom"])
@pytest.mark.parametrize("output", ["It rains.", PARTS], ids=["text", "parts"])
def test_outputs_of_calls_reach_the_prompt(served, call, output):
    result = {"type": f"{call['type']}_output", "call_id": "c1", "output": output}
    more = {"extra_body": {"enable_response_messages": True}}
    response = served.responses.create(model=MODEL, input=[call, result, USER], max_output_tokens=TOKENS, **more)
    assert "It rains." in json.dumps(response.input_messages)


def test_an_item_reference_is_the_stored_item(served):
    (call,) = respond(served, "recipient in the channel", tools=[RESPONSES_TOOL]).output
    items = [USER, {"type": "item_reference", "id": call.id},
             {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}, USER]  # fmt: skip
    more = {"extra_body": {"enable_response_messages": True}}
    response = served.responses.create(model=MODEL, input=items, max_output_tokens=TOKENS, **more)
    assert json.dumps(JSON)[1:-1] in json.dumps(response.input_messages)
    with pytest.raises(openai.NotFoundError, match="fc_gone"):
        served.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "fc_gone"}])


REFUSED = [
    ("input[1]", "'local_shell_call'", {"input": [USER, {"type": "local_shell_call", "id": "x"}]}),
    ("input[0]", "'compaction'", {"input": [{"type": "compaction", "encrypted_content": "x"}]}),
    ("input[0]", "'web_search_call'", {"input": [{"type": "web_search_call", "id": "x", "status": "completed"}]}),
    ("input.0.role", "'clown'", {"input": [{"role": "clown", "content": "x"}]}),
    *(("tools[0]", repr(tool["type"]), {"input": "x", "tools": [tool]}) for tool in (
        {"type": "local_shell"}, {"type": "web_search"}, {"type": "web_search_preview"}, {"type": "nonsense"},
        {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "n", "description": "d", "tools": []},
    )),
    ("tools[0]", "grammar", {"input": "x", "tools": [{"type": "custom", "name": "apply_patch", "format":
     {"type": "grammar", "syntax": "lark", "definition": "start: x"}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("place", "name", "request_"), REFUSED, ids=[name for _, name, _ in REFUSED])
def test_what_is_not_supported_is_named_in_one_line(served, place, name, request_):
    with pytest.raises(openai.BadRequestError) as caught:
        served.responses.create(model=MODEL, **request_)
    message = caught.value.body["message"]
    assert message.startswith(place)
    assert name in message
    assert "\n" not in message


CASES = json.loads((Path(__file__).parent / "tool_schemas.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_told_the_whole_schema(served, name):
    """The API renders each tool's whole schema into the prompt."""
    case = CASES[name]
    tool = {"type": "function", "function": {"name": "order", "parameters": case["schema"]}}
    response = served.chat.completions.create(
        model=MODEL, messages=[USER], max_tokens=1, tools=[tool], extra_body={"return_token_ids": True}
    )
    prompt = harmony.decode(response.prompt_token_ids)
    text = prompt.partition("type order = (_: {")[2].partition("}) => any;")[0]
    assert " ".join(text.split()) == case["rendered"]
