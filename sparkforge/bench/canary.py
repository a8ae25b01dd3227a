"""Canaries: single requests, each with a check, whose answers show a broken gpt-oss before the figures do.

A wrong kernel that still serves shows first in the first token of an answer (vLLM issue 37030: it must be
`<|channel|>`), then in null content, then in tool calls that are not JSON.
"""

from collections.abc import Sequence
from typing import Any

from sparkforge.bench.schema import ResultCheck
from sparkforge.core.errors import ServerError
from sparkforge.core.openai import Endpoint
from sparkforge.serve import proof

TOKENS = 512  # enough for a short answer after low-effort reasoning
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
HARMONY = "<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant"  # openai/harmony's format


def run(endpoint: Endpoint, names: Sequence[str]) -> list[ResultCheck]:
    """Ask every canary of `names` and return a check for each."""
    checks = []
    for name in names:
        try:
            fault = CANARIES[name](endpoint)
        except ServerError as error:
            fault = f"{error.what}: {error.why}"
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            fault = f"the answer does not have the API's form ({error!r})"
        checks.append(ResultCheck(name=f"canary: {name}", ok=not fault, told=fault or "correct"))
    return checks


def answers(endpoint: Endpoint) -> str:
    """A chat answer has the API's form and counts at least one token."""
    response = endpoint.chat(ASK, max_tokens=16, temperature=0)
    counted = response["usage"]["completion_tokens"]
    role = response["choices"][0]["message"]["role"]
    return "" if role == "assistant" and 1 <= counted <= 16 else f"role {role!r}, {counted} of 16 tokens"


def first_token(endpoint: Endpoint) -> str:
    """The first token after a Harmony prompt opens a channel."""
    response = endpoint.complete(HARMONY, max_tokens=1, temperature=0, skip_special_tokens=False)
    text = response["choices"][0]["text"]
    return "" if text == "<|channel|>" else f"the first token is {text!r}, not '<|channel|>'"


def content(endpoint: Endpoint) -> str:
    """A chat answer has content with at least one letter."""
    choice = endpoint.chat(ASK, max_tokens=TOKENS, temperature=0)["choices"][0]
    text = choice["message"]["content"]
    if text is None or not text.strip():
        return f"content is {text!r} (finish_reason {choice.get('finish_reason')!r})"
    return "" if any(letter.isalpha() for letter in text) else f"content is {text[:60]!r}: no word in it"


def tool_call(endpoint: Endpoint) -> str:
    """A chat answer calls the offered tool with arguments that are a JSON object with a city."""
    response = endpoint.chat(proof.ASK, tools=[proof.TOOL], max_tokens=TOKENS, temperature=0)
    return proof.tool_call_fault(response["choices"][0]["message"])


CANARIES = {question.__name__: question for question in (answers, first_token, content, tool_call)}
