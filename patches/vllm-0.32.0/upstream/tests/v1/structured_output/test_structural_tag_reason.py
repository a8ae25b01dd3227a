# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A refused structural tag: the client is told what is wrong with its schema."""

import json
from unittest.mock import MagicMock

import pytest

from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
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
