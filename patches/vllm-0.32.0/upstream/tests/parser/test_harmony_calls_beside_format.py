# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tools beside an output format: the model may call, and its answer has the format."""

import pytest
import xgrammar as xgr
from xgrammar.testing import _is_grammar_accept_string

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.parser_manager import ParserManager

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "parameters": SCHEMA}
MESSAGE = {"role": "user", "content": "x"}


class Tokenizer:
    def get_vocab(self):
        return {}


def make_chat(**options):
    return ChatCompletionRequest(
        model="gpt-oss",
        messages=[MESSAGE],
        tools=[{"type": "function", "function": FUNCTION}],
        **options,
    )


def make_responses(**options):
    return ResponsesRequest(
        model="gpt-oss", input="x", tools=[{"type": "function", **FUNCTION}], **options
    )


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
TEXT = {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}}
REQUESTS = {
    "json_schema": (make_chat, {"response_format": JSON_SCHEMA}),
    "json_object": (make_chat, {"response_format": {"type": "json_object"}}),
    "Responses": (make_responses, {"text": TEXT}),
}
CALL = '<|channel|>commentary to=functions.f json<|message|>{"city": "Oslo"}'
OUTPUTS = {
    CALL: True,
    ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"n": 1}': True,
    f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL}": True,
    '<|channel|>final json<|message|>{"city": "Oslo"}<|end|>': True,
    "<|channel|>final<|message|>Words.<|end|>": False,
    CALL.replace("functions.f", "functions.g"): False,
}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("name", REQUESTS)
def test_call_is_free_and_answer_is_constrained(name, output):
    make, options = REQUESTS[name]
    parser_cls = ParserManager.get_parser(
        tool_parser_name="openai",
        reasoning_parser_name="openai_gptoss",
        enable_auto_tools=True,
        is_harmony=True,
    )
    request = parser_cls(Tokenizer()).adjust_request(make(**options))
    grammar = xgr.Grammar.from_structural_tag(request.structured_outputs.structural_tag)
    assert _is_grammar_accept_string(grammar, output) is OUTPUTS[output]
