"""The start-up test calls: requests with forced answers, and the tiny model's first answers on a GPU."""

import json
import re
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import fake_api
import httpx
import misbehaving
import pytest

from sparkforge import pins
from sparkforge.core import openai
from sparkforge.core.errors import ServerError
from sparkforge.core.openai import Endpoint
from sparkforge.patching import series
from sparkforge.serve import first_answers, launch, proof
from sparkforge.serve.devices.in_environment import Gpu
from sparkforge.serve.record import StartPlan


def test_the_biased_tokens_are_those_of_the_vocabulary():
    pytest.importorskip("openai_harmony")  # ./inv test --fast installs none
    from sparkforge.models import harmony

    tokens = {"final": proof.FINAL, " to": proof.TO, " json": proof.JSON, "{": proof.BRACE, " " * 16: proof.SPACES}
    assert {word: harmony.encode(word) for word in tokens} == {word: [int(token)] for word, token in tokens.items()}
    special = harmony.encode("<|start|><|channel|><|message|><|end|>")
    assert special == [int(token) for token in proof.SPECIAL]


@pytest.fixture
def endpoint():
    with misbehaving.answering() as port:
        yield Endpoint(f"http://127.0.0.1:{port}", "m", key="")


PATCHES = {call.patch for call in proof.CALLS.values() if call.patch}
# Faulty answers: those of vLLM 0.32.0 as upstream ships it.
LOST = {"choices": [{"message": {"content": None, "tool_calls": []}, "finish_reason": "stop"}]}
CUT = {"choices": [{"message": {"tool_calls": [{"function": {"arguments": '{"city'}}]}}]}
CHANNEL = {"message": {"content": "Hi"}, "logprobs": {"content": [{"token": "<|channel|>"}]}}
EMPTY = {"choices": [{"message": {"role": None}}], "usage": {"completion_tokens": 0}}
UNNAMED = ("the server answered 400: no", "does not name the fault")
FAULTS = {
    "a JSON response": ({"output": [{"type": "mcp_call"}]}, r"its items are \['mcp_call'\]"),
    "a malformed header": (LOST, "content is None and not 'Paris'"),
    "a forbidden call": (LOST, "content is None and not 'Paris'"),
    "a forbidden call in a response": ({"output": [{"type": "function_call"}]}, r"its items are \['function_call'\]"),
    "a stop string in a tool call": (CUT, "do not end before the stop string"),
    "an unknown response": ("the server answered 404: Response with id 'resp_0' not found.", "does not say what to do"),
    "a refused schema": ("the server answered 400: Invalid grammar specification", "does not name the fault"),
    "a refused image": UNNAMED,
    "a JSON answer with a content type": (LOST, "content is null"),
    "a continued response": ([{"usage": {"input_tokens": n}} for n in (60, 70)], "are still there: 60, then 70"),
    "a response that fails": ([{"type": "response.completed"}], "'response.completed' and not"),
    "two streamed messages": ([{"choices": [{"delta": {"content": "ParisRome"}}]}], "come as 'ParisRome'"),
    "a whole tool schema": ({"usage": {"prompt_tokens": 90}}, "prompt has 90 tokens"),
    "a call beside a schema": (LOST, "no tool was called"),
    "a removed field": UNNAMED,
    "log probabilities of the content": ({"choices": [CHANNEL]}, "their tokens are '<|channel|>'"),
    "a bounded pattern": (EMPTY, "0 of 4 tokens"),
    "an output of parts": ({"object": "error"}, "it is no response"),
    "a server tool": ("the server answered 400: input_schema", "does not name the fault"),
    "limited white space": ({"choices": [{"finish_reason": "length"}]}, "does not end within 32 tokens"),
}


def test_every_patch_of_the_answers_has_a_canary():
    """The other patches are for speed and need hardware or an option; 0031 would need sockets and minutes."""
    for stack in ("embedded", "spark-next"):
        queues = [queue for part, queue in series.queues(pins.load(), stack) if part.patches.startswith("vllm")]
        names = {patch.name for queue in queues for patch in queue.patches}
        assert {name for name in names if "0004" <= name < "0031" and "lm-head" not in name} == PATCHES
    assert set(FAULTS) == {name for name, call in proof.CALLS.items() if call.patch}


@pytest.mark.parametrize("name", FAULTS)
def test_a_canary_tells_the_fault(name):
    answer, fault = FAULTS[name]
    assert re.search(fault, proof.CALLS[name].fault(answer))


def altered(endpoint, change):
    """Return an endpoint whose requests go through `change(send, path, body, *rest)`."""

    class Altered(Endpoint):
        def post(self, *arguments):
            return change(super().post, *arguments)

        def events(self, *arguments):
            return change(super().events, *arguments)

    return Altered(endpoint.url, endpoint.model, key=endpoint.key)


NOWHERE = Endpoint("http://127.0.0.1:1", "m", key="")


def test_a_response_that_is_not_kept_is_a_known_limit(endpoint):
    """With two API processes only one has the response, and a small store may have dropped it for other requests."""

    def lose(send, path, body, *rest):
        if body.get("previous_response_id") == fake_api.GOOD["id"]:
            raise reply_error(404, "Response with id 'resp_1' not found.")
        return send(path, body, *rest)

    outcome = proof.prove(altered(endpoint, lose), 60.0, patches=PATCHES)
    assert [name for name, limit in outcome.items() if limit] == ["a continued response"]
    assert "--api-server-count" in proof.describe(outcome)


def reply_error(status, message):
    return openai.response_error(httpx.Response(status, json={"error": {"message": message}}))


def test_canaries_are_sent_for_the_patches_that_a_stack_has_and_told_in_order(endpoint):
    assert list(proof.prove(endpoint, 60.0, patches=PATCHES)) == list(proof.CALLS)
    assert set(proof.prove(endpoint, 60.0)) == set(proof.CALLS) - set(FAULTS)


def test_every_call_that_failed_is_named_in_the_same_order(endpoint):
    """The calls run in parallel and may be answered in any order."""
    calls, together = [proof.CALLS[name] for name in ("a chat", "a streamed chat", "a tool call")], threading.Barrier(3)
    broken = [{"model": "m", "temperature": 0, **call.body} for call in calls]

    def change(send, path, body, *rest):
        if body not in broken:
            return send(path, body, *rest)
        together.wait(timeout=60)
        if "stream" in body:
            raise reply_error(500, "out of memory")
        return EMPTY

    with pytest.raises(ServerError) as caught:
        proof.prove(altered(endpoint, change), 60.0, patches=PATCHES)
    failed = "the request for a chat: role None, 0 of 4 tokens; failed, too: a streamed chat, a tool call"
    assert caught.value.why == failed


MIXED = "a long prompt beside an answer"


def streamed(content):
    return [{"choices": [{"delta": {"content": piece}}]} for piece in content]


@pytest.mark.parametrize(
    ("events", "response", "fault"),
    [
        (streamed(['{"text": "', proof.LINE, '"}']), fake_api.GOOD, ""),
        (streamed(['{"text": "', proof.LINE[:9], '!!!!"}']), fake_api.GOOD, "being written is 'Paris and!!!!'"),
        (streamed(['{"text": "', proof.LINE, '"}']), {"choices": [{"message": {"content": "!!"}}]}, "not JSON: '!!'"),
    ],
)
def test_both_answers_of_a_mixed_step_are_checked(events, response, fault):
    assert fault in proof.CALLS[MIXED].fault([events, response])
    assert bool(proof.CALLS[MIXED].fault([events, response])) == bool(fault)


@pytest.mark.parametrize("name", ["a continued response", "a response that fails"])
def test_what_needs_the_store_knows_when_it_is_off_and_another_refusal_is_a_fault(name):
    answers = [
        reply_error(404, "The model `m` does not exist."),
        ServerError("the server answered 400", f"set {proof.STORE}=1", "./inv logs", code="server.reply"),
    ]

    def refuse(*arguments):
        if "background" in proof.CALLS[name].body or "previous_response_id" in arguments[2]:
            raise answers[0]
        return fake_api.GOOD

    with pytest.raises(ServerError, match="does not exist"):
        proof.fault_of(name, altered(NOWHERE, refuse), 60.0)
    del answers[0]
    assert proof.fault_of(name, altered(NOWHERE, refuse), 60.0) == f"set {proof.STORE}=1"


UNPROVED = {
    "a JSON answer with a content type", "a JSON response", "a call beside a schema", "a forbidden call in a response",
    "limited white space",
}  # fmt: skip


def test_beside_a_draft_spelled_answers_replace_the_bias_and_the_others_are_named_as_not_proved(endpoint):
    allowed = []

    def refuse(send, path, body, *rest):
        if path == "/tokenize":
            return {"tokens": [len(body["prompt"])]}
        allowed.extend(body.get("allowed_token_ids", ()))
        if "logit_bias" in body:
            raise reply_error(400, "min_p and logit_bias are not yet supported with speculative decoding")
        return send(path, body, *rest)

    outcome = proof.prove(altered(endpoint, refuse), 60.0, patches=PATCHES)
    assert {name for name, limit in outcome.items() if limit} == UNPROVED
    assert sorted(set(allowed)) == sorted({len(call.spelled) for call in proof.CALLS.values() if call.spelled})
    assert "a JSON response (not proved, vLLM takes no logit_bias beside a draft)" in proof.describe(outcome)


def test_a_family_of_another_vocabulary_gets_no_canary_no_bias_and_its_own_keys_in_chats(endpoint):
    sent = {}

    def noted(send, path, body, *rest):
        sent.setdefault(path, []).append(body)
        return send(path, body, *rest)

    outcome = proof.prove(altered(endpoint, noted), 60.0, patches=PATCHES, family="qwen3")
    assert set(outcome) == set(proof.REQUESTS)
    assert not [body for bodies in sent.values() for body in bodies if "logit_bias" in body]
    assert all("chat_template_kwargs" in body for body in sent[proof.CHAT])
    assert not [body for body in sent[proof.COMPLETIONS] if "chat_template_kwargs" in body]


RECORDED = json.loads(first_answers.ANSWERS.read_text())["answers"]


class FakeEndpoint:
    """Answers as recorded, with each log probability changed by `shift`, and the last token replaced by `other`."""

    def __init__(self, shift=0.0, other=0):
        self.shift, self.other = shift, other

    def complete(self, prompt, **options):
        for answer in RECORDED:
            if prompt == answer["prompt"] and options["max_tokens"] == first_answers.TOKENS:
                return {"choices": [{"token_ids": [*answer["tokens"][:-1], answer["tokens"][-1] + self.other]}]}
            if prompt == [*answer["prompt"], *answer["tokens"]]:
                pairs = zip(prompt[1:], answer["logprobs"], strict=True)
                tables = [{str(token): {"logprob": value + self.shift}} for token, value in pairs]
                return {"choices": [{"prompt_logprobs": [None, *tables]}]}
        raise AssertionError(prompt)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        (FakeEndpoint(other=1), "it generates"),
        (FakeEndpoint(shift=0.2), "differ by 0.20 on average"),
        (FakeEndpoint(shift=float("nan")), "differ by nan"),
    ],
)
def test_a_wrong_answer_is_named_and_rounding_passes(endpoint, why):
    assert first_answers.compare(FakeEndpoint(-0.09)) == pytest.approx(0.09)
    with pytest.raises(ServerError, match=why):
        first_answers.compare(endpoint)


@pytest.mark.parametrize(
    ("tiny_first", "answers", "wanted"),
    [
        (True, 0.01, [("tiny-gpt-oss", True), "stop", ("gpt-oss-20b", False)]),
        (True, None, [("tiny-gpt-oss", True), "stop"]),
        (False, None, [("gpt-oss-20b", False)]),
    ],
)
def test_the_tiny_model_answers_before_the_other_one_is_loaded_and_a_wrong_answer_ends_the_start(
    fake_nvidia_smi, monkeypatch, tmp_path, tiny_first, answers, wanted
):
    done = []
    fake_nvidia_smi("NVIDIA H100 80GB HBM3, 9.0, 580.159.04, 81559, 4, Disabled")

    def start(launched, _tell):
        done.append((launched.plan.model_id, launched.plan.trial))
        return SimpleNamespace(endpoint=None, model_id="tiny-gpt-oss", proof={}, proof_seconds=0.0)

    def compare(_endpoint):
        if answers is None:
            raise ServerError("the tiny model's first answers are wrong", "by the test", "", code="server.reply")
        return answers

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(launch, "stop", lambda: done.append("stop"))
    monkeypatch.setattr(first_answers, "compare", compare)
    model = tmp_path / "gpt-oss-20b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}))
    with pytest.raises(ServerError, match="wrong") if len(wanted) == 2 else nullcontext():
        Gpu(StartPlan("gpu", model=str(model), tiny_first=tiny_first), Path("/bin/true")).start()
    assert done == wanted
