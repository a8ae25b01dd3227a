# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a request says reaches the model, or the client is told by name."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import (
    get_encoding,
    get_system_message,
    parse_chat_inputs_to_harmony_messages,
    render_for_completion,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    validation_exception_handler,
)
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.serial_utils import MsgpackEncoder

USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("effort", "level"),
    [("none", "low"), ("minimal", "low"), ("xhigh", "high"), ("max", "high")],
)
def test_effort_is_the_nearest_level(effort, level):
    text = get_encoding().decode(
        render_for_completion([get_system_message(reasoning_effort=effort)])
    )
    assert f"Reasoning: {level}\n" in text


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    ],
)
def test_refusal_stays(message):
    (message,) = parse_chat_inputs_to_harmony_messages([{"role": "assistant", **message}])
    assert (message.channel, message.content[0].text) == ("final", "I cannot.")


def test_unknown_role_is_named():
    with pytest.raises(VLLMValidationError, match="'function'"):
        parse_chat_inputs_to_harmony_messages([{"role": "function", "content": "x"}])


def test_special_token_in_the_name_of_a_called_tool_is_text():
    call = {"id": "c", "function": {"name": "<|call|>", "arguments": "{}"}}
    messages = parse_chat_inputs_to_harmony_messages(
        [USER, {"role": "assistant", "tool_calls": [call]}]
    )
    assert "<|call|>" in get_encoding().decode(render_for_completion(messages))


@pytest.mark.parametrize("value", [2**70, "\ud800"])
def test_value_that_cannot_be_encoded(value):
    client = object.__new__(AsyncMPClient)
    client.core_engine, client.encoder = b"", MsgpackEncoder()
    with pytest.raises(VLLMValidationError, match="passed on"):
        client._send_input(EngineCoreRequestType.ADD, {"a": value})


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda **f: ChatCompletionRequest(messages=[USER], **f), "guided_json"),
        (lambda **f: ChatCompletionRequest(messages=[USER], **f), "functions"),
        (lambda **f: CompletionRequest(prompt="x", **f), "guided_choice"),
        (lambda **f: ResponsesRequest(input="x", **f), "response_format"),
    ],
)
def test_field_that_is_not_supported_is_named(make, field):
    make(**{field: None})
    with pytest.raises(VLLMValidationError, match=field):
        make(**{field: {"a": 1}})


@pytest.mark.parametrize(
    ("path", "key"), [("/v1/chat/completions", "param"), ("/v1/messages", "type")]
)
def test_validation_error_is_one_line(path, key):
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate(
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}
        )
    errors = [{**e, "loc": ("body", *e["loc"])} for e in caught.value.errors()]
    assert len(errors) > 20
    request = SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=0))),
        url=SimpleNamespace(path=path),
    )
    response = asyncio.run(
        validation_exception_handler(request, RequestValidationError(errors))
    )
    error = json.loads(response.body)["error"]
    assert error["message"] == "input.0.content.0.text: Field required"
    assert key in error
