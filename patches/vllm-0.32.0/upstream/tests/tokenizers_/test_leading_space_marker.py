# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The marker of a leading space is read without writing the whole vocabulary."""

from types import SimpleNamespace

import pytest
from tokenizers import pre_tokenizers

from vllm.tokenizers.detokenizer_utils import get_leading_space_marker

METASPACE = pre_tokenizers.Metaspace(replacement="_")
BYTES = pre_tokenizers.ByteLevel()


@pytest.mark.parametrize(
    ("pre_tokenizer", "marker"),
    [
        (METASPACE, "_"),
        (pre_tokenizers.Sequence([BYTES, METASPACE]), "_"),
        (pre_tokenizers.Sequence([BYTES]), None),
        (None, None),
    ],
)
def test_the_marker_is_that_of_the_pre_tokenizer(pre_tokenizer, marker):
    # A backend without `to_str`, which writes the vocabulary, too.
    backend = SimpleNamespace(pre_tokenizer=pre_tokenizer)
    tokenizer = SimpleNamespace(backend_tokenizer=backend)
    assert get_leading_space_marker(tokenizer) == marker
