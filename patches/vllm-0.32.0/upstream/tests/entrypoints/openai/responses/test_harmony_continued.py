# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A gpt-oss request with previous_response_id has its own instructions and tools."""

import asyncio
from types import SimpleNamespace

import pytest

from vllm.entrypoints.openai.parser.harmony_utils import (
    get_encoding,
    render_for_completion,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.renderers.online_renderer import OnlineRenderer

TOOL = {"type": "function", "name": "weather", "parameters": {}}


def make_renderer():
    renderer = object.__new__(OnlineRenderer)
    renderer.use_harmony, renderer.parser = True, None
    renderer.exclude_tools_when_tool_choice_none = False
    renderer.trust_request_chat_template = False
    renderer.reasoning_effort_map = {}
    renderer.model_config = SimpleNamespace(
        max_model_len=64, encoder_config=None, is_encoder_decoder=False
    )
    renderer.validate_chat_template = lambda **kwargs: None
    renderer.render_responses_harmony_messages = lambda messages, **kwargs: None
    return renderer


def prompt(serving, **options) -> str:
    """Return a request's prompt; a response to it is stored."""
    request = ResponsesRequest(**options)
    previous = serving.response_store.get(request.previous_response_id)
    result = asyncio.run(serving._render_resolved_response_inputs(request, previous))
    serving.msg_store[request.request_id] = result.messages
    serving.response_store[request.request_id] = SimpleNamespace(
        id=request.request_id, instructions=request.instructions, output=[]
    )
    serving.last = request.request_id
    return get_encoding().decode(render_for_completion(result.messages))


@pytest.fixture
def serving():
    serving = object.__new__(OpenAIServingResponses)
    serving.use_harmony, serving.tool_server = True, None
    serving.online_renderer = make_renderer()
    serving.response_store, serving.msg_store = {}, {}
    return serving


def test_instructions_are_those_of_the_request(serving):
    first = prompt(serving, input="one", instructions="Be a pirate.")
    assert "Be a pirate." in first
    second = prompt(
        serving,
        input="two",
        instructions="Be brief.",
        previous_response_id=serving.last,
    )
    assert "Be brief." in second
    assert "one" in second and "pirate" not in second
    third = prompt(serving, input="three", previous_response_id=serving.last)
    assert "two" in third and "Be brief." not in third
    assert third.count("<|start|>system") == 1


def test_tools_are_those_of_the_request(serving):
    assert "weather" not in prompt(serving, input="one")
    second = prompt(
        serving, input="two", tools=[TOOL], previous_response_id=serving.last
    )
    assert "type weather" in second
    third = prompt(serving, input="three", previous_response_id=serving.last)
    assert "type weather" not in third


def test_reasoning_effort_is_that_of_the_request(serving):
    prompt(serving, input="one", reasoning={"effort": "low"})
    second = prompt(
        serving,
        input="two",
        reasoning={"effort": "high"},
        previous_response_id=serving.last,
    )
    assert "Reasoning: high" in second and "Reasoning: low" not in second


def test_a_developer_message_of_the_input_stays(serving):
    messages = [
        {"role": "developer", "content": "Be a pirate."},
        {"role": "user", "content": "one"},
    ]
    prompt(serving, input=messages)
    for number in range(2):
        later = prompt(
            serving, input=f"later {number}", previous_response_id=serving.last
        )
        assert later.count("Be a pirate.") == 1
    with_instructions = prompt(
        serving,
        input="three",
        instructions="Be brief.",
        previous_response_id=serving.last,
    )
    assert with_instructions.count("Be a pirate.") == 1
    assert with_instructions.index("Be brief.") < with_instructions.index("pirate")
    for _ in range(2):
        without = prompt(
            serving, input="four", tools=[TOOL], previous_response_id=serving.last
        )
        assert without.count("Be a pirate.") == 1 and "Be brief." not in without


def test_a_developer_message_behind_empty_instructions_stays(serving):
    messages = [
        {"role": "developer", "content": "Be a pirate."},
        {"role": "user", "content": "one"},
    ]
    prompt(serving, input=messages, instructions="")
    later = prompt(serving, input="two", previous_response_id=serving.last)
    assert later.count("Be a pirate.") == 1
