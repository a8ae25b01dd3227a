"""The answers of vLLM's API to each form of Harmony output, with real vLLM, the scripted checkpoint and openai.

Patches 0004 to 0012 and 0014 to 0021 of the queue correct these answers (docs/reference/answers.md).
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from sparkforge.core.openai import Endpoint
from sparkforge.models import harmony
from sparkforge.serve import proof

pytestmark = pytest.mark.integration
MODEL = "scripted"
JSON = '{"city": "Oslo"}'
THINK = "<|channel|>analysis<|message|>Let me think.<|end|>"
NEXT, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
END = f"{FINAL}All done.<|return|>"
LOOK = f"<|channel|>commentary<|message|>I look it up.<|end|>{NEXT}"
ARGUMENTS = f"<|message|>{JSON}<|call|>"
# Name → what the model writes after `<|start|>assistant`.
FORMS = {
    "final": "<|channel|>final<|message|>I have a toy and a book.<|return|>",
    "final json": f"<|channel|>final json<|message|>{JSON}<|return|>",
    "final constrain": f"<|channel|>final <|constrain|>json<|message|>{JSON}<|return|>",
    "two messages": f"{THINK}{NEXT}{END}",
    "two finals": f"<|channel|>final<|message|>First part.<|end|>{NEXT}{FINAL}Second part.<|return|>",
    "commentary, then final": f"{LOOK}{END}",
    "two thoughts": f"{THINK}{NEXT}<|channel|>analysis<|message|>It is clear.<|end|>{NEXT}{END}",
    "no start": f"{THINK}assistant{END}",
    "text first": "Plain words without a header.<|return|>",
    "message first": "<|message|>Words without a channel.<|return|>",
    "start first": f"{NEXT}{END}",
    "commentary, then a call": f"{LOOK}<|channel|>commentary to=functions.weather <|constrain|>json{ARGUMENTS}",
    "recipient in the role": f" to=functions.weather<|channel|>commentary json{ARGUMENTS}",
    "recipient in the channel": f"<|channel|>commentary to=functions.weather json{ARGUMENTS}",
    "recipient in both": f" to=functions.weather<|channel|>commentary to=functions.weather json{ARGUMENTS}",
    "analysis, then JSON": f"{THINK}{NEXT}<|channel|>final json<|message|>{JSON}<|return|>",
    "unknown channel": f"<|channel|>musings<|message|>Let me see.<|end|>{NEXT}{END}",
    "ends in a channel": "<|channel|>fin",
    "ends before a channel": f"{THINK}{NEXT}",
    "ends in a recipient": "<|channel|>commentary to=functions.wea",
    "channel without a name": "<|channel|><|message|>All done.<|return|>",
    "two channels": f"<|channel|>commentary<|channel|>commentary to=functions.weather json{ARGUMENTS}",
    "a name as role": f"{THINK}<|start|>final<|message|>All done.<|return|>",
    "role twice": f"{THINK}{NEXT}assistant{END}",
    "start twice": f"{THINK}<|start|>{NEXT}{END}",
    "special token in a message": f"<|channel|>analysis<|message|>Let me think.{END}",
    "a tool of the model's own": '<|channel|>analysis to=browser.search code<|message|>{"query": "Oslo"}<|call|>',
    "code": "<|channel|>analysis to=python code<|message|>print(7)<|call|>",
    "letters of several bytes": f"{THINK}{NEXT}<|channel|>final<|message|>Grüße 🦜 heim.<|return|>",
}
# Words that are one token, at the start of a text and after a space.
CUES = [
    "cat", "dog", "bird", "fish", "horse", "wolf", "bear", "lion", "duck", "fox", "rabbit", "snake", "mouse", "cow",
    "pig", "frog", "sun", "moon", "star", "rain", "snow", "wind", "tree", "rose", "leaf", "hill", "lake",
    "ship", "road",
]  # fmt: skip
CUE_OF = dict(zip(FORMS, CUES, strict=True))
SCRIPTS = {CUE_OF[form]: text for form, text in FORMS.items()}  # what conftest.py's server writes
TOKENS = 100
SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}
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
ROLE, CHANNEL = "recipient in the role", "recipient in the channel"
# The right answer, streamed or not → requests → forms.
ANSWERS = {
    Answer("I have a toy and a book."): {"plain": ["final"], "auto": ["final"], "none": ["final"]},
    Answer("I have a toy and a book.", finish="length"): {"no end": ["final"]},
    Answer("I have a "): {"stop": ["final"]},
    Answer("", "Let me "): {"stop": ["two messages"]},
    Answer(JSON): {
        "plain": ["final json", "final constrain"], "schema": ["final json", "final constrain"],
        "object": ["final json", "final constrain"], "auto": ["final json"], "auto, object": ["final json"],
        "auto, schema": ["final constrain"], "none": [CHANNEL, ROLE],
    },
    Answer(JSON, THOUGHT): {"schema": ["analysis, then JSON"], "auto, schema": ["analysis, then JSON"]},
    Answer(DONE): {"plain": ["start first", "unknown channel", "channel without a name"]},
    Answer(DONE, THOUGHT): {"plain": [
        "two messages", "no start", "special token in a message", "a name as role", "role twice", "start twice"]},
    Answer(DONE, f"{THOUGHT}\nIt is clear."): {"plain": ["two thoughts"]},
    Answer("First part.\nSecond part."): {"plain": ["two finals"], "auto": ["two finals"]},
    Answer(f"{LOOK_UP}\n{DONE}"): {"plain": ["commentary, then final"]},
    Answer("Plain words without a header."): {"plain": ["text first"]},
    Answer("Words without a channel."): {"plain": ["message first"]},
    Answer(): {"plain": ["ends in a channel"], "auto": ["ends in a recipient"]},
    Answer("", THOUGHT): {"plain": ["ends before a channel"]},
    Answer("Grüße 🦜 heim.", THOUGHT): {"plain": ["letters of several bytes"]},
    Answer(calls=CALL, finish="tool_calls"): {
        "auto": [ROLE, CHANNEL, "recipient in both", "two channels"], "required": [ROLE, CHANNEL],
        "auto, schema": [ROLE, CHANNEL], "auto, object": [CHANNEL],
    },
    Answer(calls=CALL): {"named": [ROLE, CHANNEL]},
    Answer(LOOK_UP, calls=CALL, finish="tool_calls"): {
        "auto": ["commentary, then a call"], "required": ["commentary, then a call"],
        "auto, schema": ["commentary, then a call"],
    },
    Answer(calls=(("weather", CUT),), finish="tool_calls"): {"stop in a call": [CHANNEL, ROLE]},
}  # fmt: skip
RIGHT = {
    (form, request): answer for answer, asked in ANSWERS.items() for request, forms in asked.items() for form in forms
}


@pytest.fixture(scope="module")
def served(scripted_server):
    return openai.OpenAI(base_url=f"{scripted_server.url}/v1", api_key=scripted_server.key, max_retries=0)


def ask_for(served, form, **options):
    messages = [{"role": "user", "content": CUE_OF[form]}]
    return served.chat.completions.create(model=MODEL, messages=messages, max_tokens=TOKENS, **options)


def whole(served, form, request):
    (choice,) = ask_for(served, form, **REQUESTS[request]).choices
    calls = tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or ())
    return Answer(choice.message.content or "", choice.message.reasoning or "", calls, choice.finish_reason)


def streamed(served, form, request):
    content, reasoning, calls, finish = "", "", {}, ""
    for event in ask_for(served, form, stream=True, **REQUESTS[request]):
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


def test_every_form_is_asked():
    assert {form for form, _ in RIGHT} | set(RESPONSES) | set(UNOFFERED) == set(FORMS)


# The scripted model prefers its script by more than the API's largest bias, so no bias can make it write white space or
# begin a call. `./inv up` tests both with the trained model (test_road.py).
BIASED = {"limited white space", "a stop string in a tool call", "a call beside a schema"}
CANARIES = [name for name, call in proof.CALLS.items() if call.patch and name not in BIASED]


@pytest.mark.parametrize("name", CANARIES)
def test_the_canary_of_a_patch_finds_no_fault(scripted_server, name):
    """The canary works with any model, because its request forces the output."""
    assert proof.fault_of(name, Endpoint(scripted_server.url, MODEL, key=scripted_server.key), 300.0) == ""


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
    assert [item.type for item in respond(served, form, tools=[RESPONSES_TOOL]).output] == RESPONSES[form]


def respond(served, form, **options):
    return served.responses.create(model=MODEL, input=CUE_OF[form], max_output_tokens=TOKENS, **options)


def respond_long(served, **options):
    """Start a response in the background that runs for seconds unless it is cancelled."""
    return served.responses.create(
        model=MODEL, input=CUE_OF["final"], background=True, max_output_tokens=3500, extra_body={"ignore_eos": True},
        **options,
    )  # fmt: skip


def test_a_response_can_be_continued(served):
    """The second turn continues the first turn's messages, but uses its own instructions and tools."""
    fields = {"instructions": "Speak like a pirate.", "tools": [RESPONSES_TOOL]}
    first = respond(served, "recipient in the channel", **fields)
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


@pytest.mark.parametrize("form", UNOFFERED)
def test_a_call_of_a_tool_that_nobody_offered_is_an_error(served, form):
    """The error names the tool; clients retry it like any server error."""
    with pytest.raises(openai.InternalServerError, match=UNOFFERED[form]):
        ask_for(served, form, tools=[TOOL])
    with pytest.raises(openai.APIError, match=UNOFFERED[form]):
        list(ask_for(served, form, tools=[TOOL], stream=True))


USER = {"role": "user", "content": CUE_OF["final"]}


def test_an_item_reference_is_the_stored_item(served):
    (call,) = respond(served, "recipient in the channel", tools=[RESPONSES_TOOL]).output
    items = [USER, {"type": "item_reference", "id": call.id},
             {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}, USER]  # fmt: skip
    more = {"extra_body": {"enable_response_messages": True}}
    response = served.responses.create(model=MODEL, input=items, max_output_tokens=TOKENS, **more)
    assert json.dumps(JSON)[1:-1] in json.dumps(response.input_messages)
    with pytest.raises(openai.NotFoundError, match="fc_gone"):
        served.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "fc_gone"}])


@pytest.mark.parametrize(
    ("place", "name", "request_"),
    [
        ("input[1]", "'compaction'", {"input": [USER, {"type": "compaction", "encrypted_content": "x"}]}),
        ("input.0.role", "'clown'", {"input": [{"role": "clown", "content": "x"}]}),
        ("tools[0]", "'local_shell'", {"input": "x", "tools": [{"type": "local_shell"}]}),
        ("tools[0]", "grammar", {"input": "x", "tools": [{"type": "custom", "name": "apply_patch", "format":
         {"type": "grammar", "syntax": "lark", "definition": "start: x"}}]}),
    ],
)  # fmt: skip
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
