# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Headers that gpt-oss leaves incomplete, or writes twice."""

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


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|channel|>final<|message|>Done.<|return|>"
CALL = f"<|channel|>commentary to=functions.f json<|message|>{JSON}<|call|>"
ANSWER, CALLED = ("", "Done.", []), ("", "", [("f", JSON)])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (f"{THOUGHT}<|start|>assistant{FINAL}", ("Hm.", "Done.", [])),
        (f"{THOUGHT}assistant{FINAL}", ("Hm.", "Done.", [])),
        (f"{THOUGHT}{FINAL}", ("Hm.", "Done.", [])),
        (f"<|channel|>analysis<|message|>Hm.{FINAL}", ("Hm.", "Done.", [])),
        (f"{THOUGHT}<|end|><|start|>assistant{FINAL}", ("Hm.", "Done.", [])),
        (f"<|start|>assistant{FINAL}", ANSWER),
        ("<|message|>Done.<|return|>", ANSWER),
        ("Done.<|return|>", ANSWER),
        (f"{THOUGHT}Done.<|return|>", ("Hm.", "Done.", [])),
        ("<|start|>assistant<|channel|>final Done.<|return|>", ANSWER),
        ("<|channel|>fin<|return|>", ("", "", [])),
        ("<|channel|>final json", ("", "", [])),
        (f"{THOUGHT}<|start|>assistant<|return|>", ("Hm.", "", [])),
        ("<|channel|>commentary to=functions.f", ("", "", [])),
        (" to=functions.f", ("", "", [])),
        (CALL, CALLED),
        (f" to=functions.f{CALL}", CALLED),
        (f"{THOUGHT}<|start|>assistant to=functions.f{CALL}", ("Hm.", *CALLED[1:])),
    ],
)
def test_nothing_is_lost_and_no_header_is_content(output, expected, streamed):
    assert ask(output, streamed) == expected


def test_responses_leave_an_unknown_channel_out():
    from openai_harmony import Message, Role

    from vllm.entrypoints.openai.responses.harmony import harmony_to_response_output

    message = Message.from_role_and_content(Role.ASSISTANT, "x").with_channel("musings")
    assert harmony_to_response_output(message, frozenset()) == []
