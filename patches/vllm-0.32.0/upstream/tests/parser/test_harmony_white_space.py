# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""White space in structured output has a limit."""

import json

import pytest
import xgrammar as xgr
from xgrammar.testing import _is_grammar_accept_string

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.harmony import _adjust_output_format

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("spaces", "accepted"), [(0, True), (21, True), (80, False)])
def test_white_space_ends(spaces, accepted):
    request = _adjust_output_format(
        ChatCompletionRequest(
            model="gpt-oss",
            messages=[{"role": "user", "content": "x"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": SCHEMA},
            },
        )
    )
    grammar = xgr.Grammar.from_structural_tag(request.structured_outputs.structural_tag)
    text = json.dumps({"city": "Oslo"}).replace(": ", ":" + " " * spaces)
    output = f"<|channel|>final json<|message|>{text}<|end|>"
    assert _is_grammar_accept_string(grammar, output) is accepted
