"""What the tiny model must answer before a larger one is loaded; an endpoint made here answers as recorded, or not."""

import json

import pytest

from sparkforge.core.errors import ServerError
from sparkforge.serve import first_answers, launch
from sparkforge.serve.devices import gpu, in_environment
from sparkforge.serve.devices.gpu import Gpu
from sparkforge.serve.plan import StartPlan

RECORDED = json.loads(first_answers.ANSWERS.read_text())["answers"]


class FakeEndpoint:
    """Answers as recorded, each log probability moved by `shift`, the last token by `other`."""

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


def test_the_recorded_prompts_reach_beyond_the_window():
    lengths = [len(answer["prompt"]) for answer in RECORDED]
    assert lengths[0] < 128 < lengths[-1]
    assert all(len(answer["tokens"]) == first_answers.TOKENS for answer in RECORDED)


@pytest.mark.parametrize("shift", [0.0, -0.09])
def test_rounding_passes(shift):
    assert first_answers.compare(FakeEndpoint(shift)) == pytest.approx(abs(shift))


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        (FakeEndpoint(other=1), "it generates"),
        (FakeEndpoint(shift=0.2), "differ by 0.20 on average"),
        (FakeEndpoint(shift=float("nan")), "differ by nan"),
    ],
)
def test_a_wrong_answer_is_named(endpoint, why):
    with pytest.raises(ServerError, match=why):
        first_answers.compare(endpoint)


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """What a start does, in order; processes are not started."""
    done = []
    monkeypatch.setattr(gpu.capabilities, "find", lambda _env: ("H100", gpu.capabilities.load()["9.0"]))
    for module in (gpu, in_environment):
        monkeypatch.setattr(module, "write_tiny", lambda _python: tmp_path / "tiny")

    def start(launched, _tell):
        done.append((launched.plan.model_id, launched.plan.trial))
        return FakeServer()

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(launch, "stop", lambda: done.append("stop"))
    monkeypatch.setattr(first_answers, "compare", lambda _endpoint: done.append("compare") or 0.01)
    return done


class FakeServer:
    endpoint, model_id, proof, proof_seconds = None, "tiny-gpt-oss", {}, 0.0


def device(tmp_path, **plan):
    model = tmp_path / "gpt-oss-20b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}))
    return Gpu(StartPlan("gpu", model=str(model), **plan))


def test_the_tiny_model_answers_before_the_other_one_is_loaded(steps, tmp_path):
    device(tmp_path, tiny_first=True).start()
    assert steps == [("tiny-gpt-oss", True), "compare", "stop", ("gpt-oss-20b", False)]


def test_wrong_answers_end_the_start_and_leave_no_server(steps, tmp_path, monkeypatch):
    def fail(_endpoint):
        raise ServerError("the tiny model's first answers are wrong", "by the test", "", code="server.reply")

    monkeypatch.setattr(first_answers, "compare", fail)
    with pytest.raises(ServerError, match="wrong"):
        device(tmp_path, tiny_first=True).start()
    assert steps == [("tiny-gpt-oss", True), "stop"]


def test_a_tiny_server_that_ended_by_itself_does_not_hide_what_was_wrong(steps, tmp_path, monkeypatch):
    def fail(_endpoint):
        raise ServerError("the tiny model's first answers are wrong", "it did not answer", "", code="server.reply")

    def gone():
        raise ServerError("no server runs", "it ended", "", code="server.not-running")

    monkeypatch.setattr(first_answers, "compare", fail)
    monkeypatch.setattr(launch, "stop", gone)
    with pytest.raises(ServerError, match="first answers are wrong"):
        device(tmp_path, tiny_first=True).start()
    assert steps == [("tiny-gpt-oss", True)]


def test_it_can_be_left_out(steps, tmp_path):
    device(tmp_path).start()
    assert steps == [("gpt-oss-20b", False)]
