# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A refused structural tag: the client is told what is wrong with its schema, and
which field of its request that is."""

import asyncio
import json
from unittest.mock import MagicMock

import pytest

from vllm.config import StructuredOutputsConfig
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize("backend", ["auto", "xgrammar"])
def test_reason_is_named(backend):
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<|channel|>final json<|message|>",
            "content": {"type": "json_schema", "json_schema": {"type": "nonsense"}},
            "end": "<|end|>",
        },
    }
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(structural_tag=json.dumps(tag))
    )
    config = StructuredOutputsConfig(backend=backend)
    model = MagicMock(is_diffusion=False)
    with pytest.raises(VLLMValidationError, match='Unsupported type "nonsense"'):
        params._validate_structured_outputs(model, config, MagicMock())


FORMAT = {"type": "json_schema", "name": "x", "schema": {}}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ChatCompletionRequest(messages=[], response_format={"type": "json_object"}),
         "response_format"),
        (ChatCompletionRequest(messages=[], structured_outputs={"regex": "a"}),
         "structured_outputs"),
        (ResponsesRequest(input="x", text={"format": FORMAT}), "text"),
    ],
)  # fmt: skip
def test_field_is_named(request_, field):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    config = StructuredOutputsConfig(backend="xgrammar")

    async def ask():
        params.verify(MagicMock(is_diffusion=False), None, config, MagicMock())

    with pytest.raises(VLLMValidationError) as caught:
        asyncio.run(
            GenerateBaseServing._with_kv_transfer_rejection_cleanup(
                MagicMock(has_kv_connector=False,
                          _naming_grammar_field=GenerateBaseServing._naming_grammar_field),
                ask(), request_, None,
            )
        )  # fmt: skip
    assert caught.value.parameter == field


@pytest.mark.parametrize(
    ("format_", "error"),
    [({"type": "json_object"}, VLLMValidationError), (None, GenerationError)],
)
def test_a_grammar_without_a_text_is_the_clients_fault(format_, error):
    request = ChatCompletionRequest(
        messages=[], **({"response_format": format_} if format_ else {})
    )

    async def fail():
        raise GenerationError("Internal server error")

    serving = MagicMock(
        has_kv_connector=False,
        _naming_grammar_field=GenerateBaseServing._naming_grammar_field,
    )
    with pytest.raises(error):
        asyncio.run(
            GenerateBaseServing._with_kv_transfer_rejection_cleanup(
                serving, fail(), request, None
            )
        )
