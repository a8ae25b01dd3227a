# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Several messages of one kind: a stream has the line end of the whole answer."""

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser.parser_manager import ParserManager

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
FINAL, THOUGHT = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
CALL = "<|channel|>commentary to=functions.f json<|message|>{}"
NEXT = "<|end|><|start|>assistant"


class Tokenizer:
    """Decodes as gpt-oss's tokenizer does, without a download."""

    def decode(self, token_ids, **kwargs):
        return get_encoding().decode(token_ids)

    def get_vocab(self):
        return {}


def make_parser():
    parser_cls = ParserManager.get_parser(
        tool_parser_name="openai",
        reasoning_parser_name="openai_gptoss",
        enable_auto_tools=True,
        is_harmony=True,
    )
    return parser_cls(Tokenizer())


def stream(parser, request, token_ids, size):
    """Return reasoning and content that the deltas of *size* tokens add up to."""
    reasoning, content = "", ""
    for begin in range(0, len(token_ids), size):
        delta = parser.parse_delta(
            "",
            token_ids[begin : begin + size],
            request,
            finished=begin + size >= len(token_ids),
        )
        if delta is not None:
            reasoning += delta.reasoning or ""
            content += delta.content or ""
    return reasoning, content


@pytest.mark.parametrize(
    ("output", "stop", "reasoning", "content"),
    [
        (f"{FINAL}One.{NEXT}{FINAL}Two.", [], "", "One.\nTwo."),
        (f"{COMMENTARY}One.{NEXT}{THOUGHT}So{NEXT}{FINAL}Two.", [], "So", "One.\nTwo."),
        (f"{THOUGHT}One.{NEXT}{THOUGHT}Two.{NEXT}{FINAL}A", [], "One.\nTwo.", "A"),
        (f"{COMMENTARY}One.{NEXT}{CALL}", [], "", "One."),
        (f"{FINAL}One.{NEXT}{FINAL}{NEXT}{FINAL}Two.", [], "", "One.\nTwo."),
        (f"{FINAL}One.{NEXT}{FINAL}Two", ["Two"], "", "One."),
        (f"{FINAL}One.", [], "", "One."),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream_is_the_whole_answer(output, stop, reasoning, content, size):
    request = ChatCompletionRequest(
        model="gpt-oss",
        messages=[{"role": "user", "content": "x"}],
        tools=[TOOL],
        stop=stop,
    )
    token_ids = get_encoding().encode(output, allowed_special="all")
    whole = make_parser().parse("", request, model_output_token_ids=token_ids)
    assert (whole[0] or "", whole[1] or "") == (reasoning, content)
    parser = make_parser()
    for _ in range(2):  # the next turn begins anew
        assert stream(parser, request, token_ids, size) == (reasoning, content)
