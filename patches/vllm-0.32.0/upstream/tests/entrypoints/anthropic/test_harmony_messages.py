# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Messages API in Harmony's terms."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser.parser_manager import ParserManager

USER = {"role": "user", "content": "x"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def convert(**options):
    options = {"messages": [USER], "max_tokens": 100_000, **options}
    request = AnthropicMessagesRequest(model="gpt-oss", **options)
    chat = AnthropicServingMessages.to_chat_completion_request(request)
    serving = SimpleNamespace(online_renderer=SimpleNamespace(use_harmony=True))
    AnthropicServingMessages._adjust_for_harmony(serving, chat)
    return chat


@pytest.mark.parametrize(
    ("budget", "effort"),
    [(1024, "low"), (4096, "low"), (10_000, "medium"), (31_999, "high")],
)
def test_budget_is_an_effort(budget, effort):
    thinking = {"type": "enabled", "budget_tokens": budget}
    chat = convert(thinking=thinking)
    assert (chat.thinking_token_budget, chat.reasoning_effort) == (None, effort)
    chat = convert(thinking=thinking, output_config={"effort": "max"})
    assert chat.reasoning_effort == "max"


def test_assistant_message_at_the_end_is_continued():
    last = {"role": "assistant", "content": "I have"}
    assert convert(messages=[USER, last]).continue_final_message
    assert not convert().continue_final_message


def test_forbidden_call_is_no_text():
    chat = convert(tools=[TOOL], tool_choice={"type": "none"})
    parser = ParserManager.get_parser(
        tool_parser_name="openai",
        reasoning_parser_name="openai_gptoss",
        enable_auto_tools=True,
        is_harmony=True,
    )(SimpleNamespace(get_vocab=dict))
    output = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    token_ids = get_encoding().encode(output, allowed_special="all")
    answer = parser.parse("", chat, model_output_token_ids=token_ids)
    assert answer == (None, None, None)


@pytest.mark.parametrize("cls", [AnthropicMessagesRequest, AnthropicCountTokensRequest])
def test_server_tool_is_named(cls):
    tool = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(ValidationError, match=r"tools\[1\]: the tool 'web_search'"):
        cls(model="m", messages=[USER], max_tokens=9, tools=[TOOL, tool])
