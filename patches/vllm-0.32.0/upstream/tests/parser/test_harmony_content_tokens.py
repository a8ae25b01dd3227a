# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Log probabilities are the content's, messages can be continued, and calls of tools
that nobody offered are errors."""

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import (
    get_encoding,
    parse_chat_inputs_to_harmony_messages,
    render_for_completion,
)
from vllm.exceptions import VLLMServerError, VLLMValidationError
from vllm.parser.parser_manager import ParserManager

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


class Tokenizer:
    def get_vocab(self):
        return {}


def make_parser():
    return ParserManager.get_parser(
        tool_parser_name="openai",
        reasoning_parser_name="openai_gptoss",
        enable_auto_tools=True,
        is_harmony=True,
    )(Tokenizer())


def encode(text):
    return get_encoding().encode(text, allowed_special="all")


def ask(output, streamed, prompt_token_ids=None, **options):
    """Return the content, and the tokens that it is made of."""
    request = ChatCompletionRequest(model="m", messages=[USER], **options)
    token_ids, parser = encode(output), make_parser()
    if not streamed:
        if prompt_token_ids:
            parser.set_prompt_token_ids(prompt_token_ids)
        _, content, _ = parser.parse("", request, model_output_token_ids=token_ids)
        return content or "", parser.take_content_tokens()
    content, tokens = "", []
    for position, token_id in enumerate(token_ids):
        delta = parser.parse_delta(
            "",
            [token_id],
            request,
            prompt_token_ids=prompt_token_ids,
            finished=position == len(token_ids) - 1,
        )
        tokens += parser.take_content_tokens()
        content += (delta and delta.content) or ""
    return content, tokens


THOUGHT = "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("output", "options", "content"),
    [
        (f"{THOUGHT}{FINAL}All done.<|return|>", {}, "All done."),
        (f"{FINAL}Grüße 🦜 heim.<|return|>", {}, "Grüße 🦜 heim."),
        (f"{FINAL}One.<|end|><|start|>assistant{FINAL}Two.<|return|>", {}, "One.\nTwo."),
        (f"{FINAL}I have a toy", {"stop": ["toy"]}, "I have a "),
        (f"{FINAL}I have a toy", {"stop": ["ve a t"]}, "I ha"),
        ("<|channel|>commentary to=functions.f json<|message|>{}<|call|>",
         {"tools": [TOOL]}, ""),
        ("Grüße 🦜 without a header.<|return|>", {}, "Grüße 🦜 without a header."),
        (f"{THOUGHT}<|channel|>final json Grüße<|end|> heim. ", {}, "Grüße heim."),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_content(output, options, content, streamed):
    answer, tokens = ask(output, streamed, **options)
    assert answer == content
    assert "".join(text for _, text in tokens) == content
    indices = [index for index, _ in tokens]
    assert indices == sorted(set(indices))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tool", ["browser.search", "python", "container.exec"])
@pytest.mark.parametrize("channel", ["analysis", "commentary"])
def test_call_of_a_tool_that_nobody_offered(channel, tool, streamed):
    output = f"<|channel|>{channel} to={tool} code<|message|>1<|call|>"
    with pytest.raises(VLLMServerError, match=tool):
        ask(output, streamed, tools=[TOOL])


@pytest.mark.parametrize("streamed", [False, True])
def test_message_is_continued(streamed):
    messages = parse_chat_inputs_to_harmony_messages(
        [USER, {"role": "assistant", "content": "I have"}]
    )
    prompt = render_for_completion(messages, continue_final_message=True)
    assert get_encoding().decode(prompt).endswith(f"<|start|>assistant{FINAL}I have")
    content, tokens = ask(" a toy.<|return|>", streamed, prompt_token_ids=prompt)
    assert content == "".join(text for _, text in tokens) == " a toy."


def test_only_an_assistant_message_can_be_continued():
    messages = parse_chat_inputs_to_harmony_messages([USER])
    with pytest.raises(VLLMValidationError, match="assistant message"):
        render_for_completion(messages, continue_final_message=True)
