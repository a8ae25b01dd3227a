"""What a start proves: requests whose answers are forced, for every model of the vocabulary."""

import re

import fake_api
import pytest

from sparkforge import pins
from sparkforge.core.errors import ServerError
from sparkforge.patching import status
from sparkforge.serve import client, proof


def test_the_biased_tokens_are_those_of_the_vocabulary():
    pytest.importorskip("openai_harmony")  # ./inv test --fast installs none
    from sparkforge.models import harmony

    words = {"final": proof.FINAL, " to": proof.TO, " json": proof.JSON, "{": proof.BRACE, " " * 16: proof.SPACES}
    assert {word: harmony.encode(word) for word in words} == {word: [int(token)] for word, token in words.items()}
    special = harmony.encode("<|start|><|channel|><|message|><|end|>")
    assert special == [int(token) for token in proof.SPECIAL]


def test_a_limit_is_one_of_a_call_that_is_sent():
    assert set(proof.LIMITS) <= set(proof.CALLS)


PATCHES = {call.patch for call in proof.CALLS.values() if call.patch}
# What a fault looks like: those are the answers of vLLM 0.32.0 as upstream ships it.
LOST = {"choices": [{"message": {"content": None, "tool_calls": []}, "finish_reason": "stop"}]}
FAULTS = {
    "a JSON response": ({"output": [{"type": "mcp_call"}]}, r"its items are \['mcp_call'\]"),
    "a malformed header": (LOST, "content is None and not 'Paris'"),
    "a forbidden call": (LOST, "content is None and not 'Paris'"),
    "a refused schema": ("the server answered 400: Invalid grammar specification", "does not name the fault"),
    "a refused image": ("the server answered 400: no", "does not name the fault"),
    "limited white space": ({"choices": [{"finish_reason": "length"}]}, "does not end within 32 tokens"),
}


def test_every_patch_of_the_answers_has_a_canary():
    """0001 to 0003 are the hardware's; 0006 is proved by a call that every stack is sent."""
    for stack in ("embedded", "spark-next"):
        names = {patch.name for _, queue in status.queues(pins.load(), stack) for patch in queue.patches}
        answers = {name for name in names if "harmony" in name or "structural-tag" in name or "final-json" in name}
        assert {name for name in answers if "stop-strings" not in name} == PATCHES
    assert set(FAULTS) == {name for name, call in proof.CALLS.items() if call.patch}


@pytest.mark.parametrize("name", FAULTS)
def test_a_canary_tells_the_fault(name):
    answer, fault = FAULTS[name]
    assert re.search(fault, proof.CALLS[name].fault(answer))


def sent(monkeypatch, patches):
    """Prove a server that answers rightly; return the names of the calls that were sent."""

    def request(name, url, path, body, *rest):
        code, value = fake_api.answer(body)
        if code != 200:
            raise client.unanswered(name, f"the server answered {code}: {value['error']['message']}")
        return value

    def refusal(name, *rest):
        with pytest.raises(ServerError) as caught:
            request(name, *rest)
        return caught.value.why

    monkeypatch.setattr(client, "request", request)
    monkeypatch.setattr(client, "refusal", refusal)
    stream = [{"choices": [{"delta": {"role": "assistant"}, "finish_reason": "stop"}]}]
    monkeypatch.setattr(client, "events", lambda *_: iter(stream))
    return proof.prove("http://127.0.0.1:1", "m", 60.0, patches=patches)


def test_canaries_are_sent_for_the_patches_that_a_stack_has(monkeypatch):
    assert set(sent(monkeypatch, PATCHES)) == set(proof.CALLS)
    assert set(sent(monkeypatch, ())) == set(proof.CALLS) - set(FAULTS)
