# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""tool_choice none: the client gets a message."""

from types import SimpleNamespace

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.entrypoints.openai.responses.context import HarmonyContext
from vllm.entrypoints.openai.responses.harmony import harmony_to_response_output
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.harmony import HarmonyParser
from vllm.parser.parser_manager import ParserManager
from vllm.renderers.online_renderer import OnlineRenderer


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


CALL = f"<|channel|>commentary to=functions.f json<|message|>{JSON}<|call|>"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tool_choice": "none"}, ("", JSON, [])),
        ({"tool_choice": "auto"}, ("", "", [("f", JSON)])),
    ],
)
def test_forbidden_call_is_content(options, expected, streamed):
    assert ask(CALL, streamed, **options) == expected


RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {}}


def output(token_ids: list[int], finished: bool) -> RequestOutput:
    completion = CompletionOutput(0, "", token_ids, None, None)
    completion.finish_reason = "stop" if finished else None
    return RequestOutput("x", None, [1], None, [completion], finished)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("tool_choice", "expected"), [("none", "message"), ("auto", "function_call")]
)
def test_forbidden_call_is_a_message_in_responses(tool_choice, expected, streamed):
    request = ResponsesRequest(
        input="x", tools=[RESPONSES_TOOL], tool_choice=tool_choice
    )
    names = frozenset({"f"})
    context = HarmonyContext(
        [], [], names, response_parser=make_parser(), request=request
    )
    token_ids = get_encoding().encode(CALL, allowed_special="all")
    pieces = [[token_id] for token_id in token_ids] if streamed else [token_ids]
    recipients = set()
    for position, piece in enumerate(pieces):
        context.append_output(output(piece, position == len(pieces) - 1))
        recipients |= {
            segment.recipient
            for segment in context.last_append_segments
            if segment.delta
        }
    (item,) = harmony_to_response_output(context.messages[-1], names)
    assert item.type == expected
    if streamed:
        assert recipients == {None if expected == "message" else "functions.f"}


@pytest.mark.parametrize("exclude", [False, True])
def test_responses_prompt_lists_no_forbidden_tools_on_request(exclude):
    request = ResponsesRequest(input="x", tools=[RESPONSES_TOOL], tool_choice="none")
    renderer = SimpleNamespace(
        adjust_harmony_request=lambda request: None,
        exclude_tools_when_tool_choice_none=exclude,
        model_config=SimpleNamespace(
            max_model_len=64, encoder_config=None, is_encoder_decoder=False
        ),
        reasoning_effort_map={},
        render_responses_harmony_messages=lambda messages, **options: None,
        _get_harmony_builtin_tool_descriptions=lambda *args: {},
    )
    result = OnlineRenderer._render_responses_with_harmony(
        renderer,
        request,
        previous_messages=None,
        previous_response_outputs=None,
        tool_server=None,
    )
    roles = [message.author.role.value for message in result.messages]
    assert roles == (["system", "user"] if exclude else ["system", "developer", "user"])
