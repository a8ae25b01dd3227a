# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""gpt-oss takes text only."""

import pytest

from vllm.entrypoints.openai.parser.harmony_utils import (
    parse_chat_input_to_harmony_message,
)
from vllm.entrypoints.openai.responses.harmony import response_input_to_harmony
from vllm.exceptions import VLLMValidationError

URL = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_data": URL}},
    ],
)
def test_chat_refuses_what_is_not_text(part):
    content = [{"type": "text", "text": "What is this?"}, part]
    with pytest.raises(VLLMValidationError, match=part["type"]):
        parse_chat_input_to_harmony_message({"role": "user", "content": content})


def test_responses_refuse_an_image():
    content = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    with pytest.raises(VLLMValidationError, match="input_image"):
        response_input_to_harmony({"role": "user", "content": content}, [])


def test_text_parts_are_kept():
    content = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    (message,) = parse_chat_input_to_harmony_message(
        {"role": "user", "content": content}
    )
    assert [part.text for part in message.content] == ["Hello, ", "you"]
