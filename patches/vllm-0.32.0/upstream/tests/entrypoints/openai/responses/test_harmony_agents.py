# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Items and tools of agents are taken whole, or named."""

import pytest

from vllm.entrypoints.openai.responses.harmony import response_input_to_harmony
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a b"}
PARTS = [{"type": "input_text", "text": "It "}, {"type": "input_text", "text": "rains."}]


def convert(*items):
    request = ResponsesRequest(input=list(items))
    return [response_input_to_harmony(item, request.input) for item in request.input]


@pytest.mark.parametrize("call", [CALL, CUSTOM], ids=["function", "custom"])
@pytest.mark.parametrize("output", ["It rains.", PARTS], ids=["text", "parts"])
def test_output_of_a_call(call, output):
    kind = f"{call['type']}_output"
    message = convert(call, {"type": kind, "call_id": "c", "output": output})[1]
    assert (message.author.name, message.recipient) == ("functions.f", "assistant")
    assert message.content[0].text == "It rains."


def test_custom_call_is_shown_as_its_function():
    (message,) = convert(CUSTOM)
    assert message.recipient == "functions.f"
    assert message.content[0].text == '{"input": "a b"}'


def test_image_in_an_output_is_named():
    image = {"type": "input_image", "image_url": "data:x", "detail": "auto"}
    with pytest.raises(VLLMValidationError, match="input_image"):
        convert(CALL, {"type": "function_call_output", "call_id": "c", "output": [image]})


def test_summary_stands_for_reasoning():
    summary = [{"type": "summary_text", "text": "So."}]
    (message,) = convert({"type": "reasoning", "summary": summary})
    assert (message.channel, message.content[0].text) == ("analysis", "So.")


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"type": "local_shell_call"}, "'local_shell_call'"),
        ({"type": "compaction", "encrypted_content": "x"}, "'compaction'"),
        ({"type": "web_search_call", "id": "w"}, "'web_search_call'"),
        ({"type": "function_call", "name": "f"}, "'call_id'"),
        ({"role": "user"}, "'content'"),
    ],
)
def test_item_that_is_not_supported_is_named(item, name):
    with pytest.raises(VLLMValidationError, match=rf"input\[1\].*{name}"):
        ResponsesRequest(input=[{"role": "user", "content": "x"}, item])


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "local_shell"},
        {"type": "web_search"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "namespace", "name": "n", "description": "", "tools": []},
        {"type": "custom", "name": "apply_patch"},
        {"type": "nonsense"},
    ],
    ids=lambda tool: tool["type"],
)
def test_tool_that_is_not_supported_is_named(tool):
    from vllm.entrypoints.openai.responses.harmony import check_harmony_tools

    with pytest.raises(VLLMValidationError, match=rf"tools\[0\].*{tool['type']}"):
        check_harmony_tools(ResponsesRequest(input="x", tools=[tool]), None)
