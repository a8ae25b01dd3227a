# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`final json`: the content type that vLLM's own grammar lets gpt-oss write."""

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser.harmony import HarmonyParser
from vllm.parser.parser_manager import ParserManager


class Tokenizer:
    """Decodes as gpt-oss's tokenizer does, without a download."""

    def decode(self, token_ids, **kwargs):
        return get_encoding().decode(token_ids)

    def get_vocab(self):
        return {}


def make_parser() -> HarmonyParser:
    parser_cls = ParserManager.get_parser(
        tool_parser_name="openai",
        reasoning_parser_name="openai_gptoss",
        enable_auto_tools=True,
        is_harmony=True,
    )
    return parser_cls(Tokenizer())


def ask(output: str, streamed: bool, **options):
    """Return (reasoning, content, names and arguments of calls)."""
    options.setdefault("tools", [TOOL])
    request = ChatCompletionRequest(
        model="gpt-oss", messages=[{"role": "user", "content": "x"}], **options
    )
    token_ids = get_encoding().encode(output, allowed_special="all")
    if not streamed:
        reasoning, content, calls = make_parser().parse(
            "", request, model_output_token_ids=token_ids
        )
        return (
            reasoning or "",
            content or "",
            [(call.name, call.arguments) for call in calls or ()],
        )
    parser, reasoning, content, names, arguments = make_parser(), "", "", [], []
    for position, token_id in enumerate(token_ids):
        finished = position == len(token_ids) - 1
        delta = parser.parse_delta("", [token_id], request, finished=finished)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.function.name:
                names.append(call.function.name)
                arguments.append("")
            arguments[call.index] += call.function.arguments or ""
    return reasoning, content, list(zip(names, arguments))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
JSON = '{"a": 1}'


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("header", ["final json", "final <|constrain|>json", "final"])
def test_content_type_of_final_is_no_recipient(header, streamed):
    output = f"<|channel|>{header}<|message|>{JSON}<|return|>"
    assert ask(output, streamed) == ("", JSON, [])


def test_message_has_the_content_type():
    output = f"<|channel|>final json<|message|>{JSON}<|return|>"
    token_ids = get_encoding().encode(output, allowed_special="all")
    segments = make_parser().process_chunk(token_ids).segments
    (message,) = [s.completed_message for s in segments if s.completed_message]
    assert (message.recipient, message.content_type) == (None, "json")


@pytest.mark.parametrize("streamed", [False, True])
def test_recipient_of_a_call_is_kept(streamed):
    output = f"<|channel|>commentary to=functions.f json<|message|>{JSON}<|call|>"
    assert ask(output, streamed) == ("", "", [("f", JSON)])
