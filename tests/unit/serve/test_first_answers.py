"""What the tiny model must answer before a larger one is loaded; an endpoint made here answers as recorded, or not."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from sparkforge.core.errors import ServerError
from sparkforge.serve import first_answers, launch
from sparkforge.serve.devices import in_environment
from sparkforge.serve.devices.in_environment import Gpu
from sparkforge.serve.record import StartPlan

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


def test_rounding_passes():
    assert first_answers.compare(FakeEndpoint(-0.09)) == pytest.approx(0.09)


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


@pytest.mark.parametrize(
    ("tiny_first", "answers", "wanted"),
    [
        (True, 0.01, [("tiny-gpt-oss", True), "stop", ("gpt-oss-20b", False)]),
        (True, None, [("tiny-gpt-oss", True), "stop"]),
        (False, None, [("gpt-oss-20b", False)]),
    ],
)
def test_the_tiny_model_answers_before_the_other_one_is_loaded_and_a_wrong_answer_ends_the_start(
    monkeypatch, tmp_path, tiny_first, answers, wanted
):
    done = []
    monkeypatch.setattr(
        in_environment.capabilities, "find", lambda *_: ("H100", in_environment.capabilities.load()["9.0"])
    )
    monkeypatch.setattr(in_environment, "write_tiny", lambda _python: tmp_path / "tiny")

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
        Gpu(StartPlan("gpu", model=str(model), tiny_first=tiny_first)).start()
    assert done == wanted
