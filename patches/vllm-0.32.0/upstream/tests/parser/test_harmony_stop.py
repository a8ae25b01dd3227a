# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stop strings: the token that completes one is the last token ID."""

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


FINAL, THOUGHT = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
CALL = "<|channel|>commentary to=functions.f json<|message|>"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("output", "stop", "expected"),
    [
        (f"{FINAL}I have a toy", ["toy"], ("", "I have a ", [])),
        (f"{FINAL}I have a toy", "a toy", ("", "I have ", [])),
        (f"{FINAL}toy", ["toy"], ("", "", [])),
        (f"{THOUGHT}I have a toy", ["long string", "toy"], ("I have a ", "", [])),
        (
            f"{THOUGHT}Hm.<|end|><|start|>assistant{FINAL}Yes.",
            ["."],
            ("Hm.", "Yes", []),
        ),
        (f'{CALL}{{"a": "toy', ["toy"], ("", "", [("f", '{"a": "')])),
        (f"{CALL}toy", ["toy"], ("", "", [("f", "")])),
        (f"{CALL}{JSON}<|call|>", ["toy"], ("", "", [("f", JSON)])),
        (f"{FINAL}I have a", ["a toy"], ("", "I have a", [])),
        (f"{FINAL}I have a toy<|return|>", ["a toys"], ("", "I have a toy", [])),
    ],
)
def test_stop_string_is_left_out(output, stop, expected, streamed):
    assert ask(output, streamed, stop=stop) == expected


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_string_is_included_on_request(streamed):
    expected = ("", "I have a toy", [])
    options = {"stop": ["toy"], "include_stop_str_in_output": True}
    assert ask(f"{FINAL}I have a toy", streamed, **options) == expected
