"""The committed tiny model predicts far better than token counts, and fails the gate if the computation is wrong."""

import math

import pytest
import torch

from lab.training import corpus, export, faults, reference, texts
from lab.training.model import gains
from spark_mxfp4 import mxfp4
from sparkforge.bench import baselines
from sparkforge.models import tiny
from sparkforge.models.harmony import special_tokens


@pytest.fixture(scope="module")
def trained():
    return export.unpack()[0].eval()


@pytest.fixture(scope="module")
def scored():
    return reference.scored()


@pytest.fixture(scope="module")
def right(trained, scored):
    return faults.bits_per_byte(trained, scored)


@pytest.fixture(scope="module")
def limit():
    return baselines.load().threshold("tiny-gpt-oss", "persuasion-24").bounds("")[0][1]


def test_it_has_harmonys_tokens_and_predicts_the_held_out_text_far_better_than_counting(right, limit):
    rows = set(export.unpack()[1].tolist())
    names = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
    assert {special_tokens()[name] for name in names} <= rows
    (text,) = (text for text in baselines.load().texts if text.name == "persuasion-24")
    assert corpus.HELD_OUT.read_text() == text.read()  # the gate's
    assert texts.HELD_OUT[0] == "persuasion"
    known = baselines.load().threshold("tiny-gpt-oss", "persuasion-24").reference
    assert right == pytest.approx(known.metrics(1)["bits_per_byte"], rel=1e-4)
    assert right < limit
    facts = tiny.from_safetensors(tiny.FILE.read_bytes())[1]
    assert right <= 0.8 * float(facts["unigram_bits_per_byte"])


@pytest.mark.parametrize("broken", ["noise", "one layer twice"])
def test_a_checkpoint_with_a_wrong_layer_fails(scored, limit, broken):
    model, _ = export.unpack()
    first, second, *_ = model.each_layer()
    torch.manual_seed(0)
    with torch.no_grad():
        for wrong, parameter in zip(second.parameters(), first.parameters(), strict=True):
            wrong.copy_(parameter if broken != "noise" else wrong + 0.5 * wrong.std() * torch.randn_like(wrong))
    assert faults.bits_per_byte(model.eval(), scored) > limit


# To save minutes, one of the 32 biases for each layer and projection; the weakest (layer 3, expert 3) is included.
KNOWN = faults.known(tiny.sizes())
TRIED = [name for name, fault in KNOWN.items() if fault.no_bias is None or fault.no_bias[0] == fault.no_bias[1]]


@pytest.mark.parametrize("name", TRIED)
def test_every_fault_fails_the_gate(trained, scored, limit, name):
    assert faults.bits_per_byte(trained, scored, KNOWN[name]) > limit


def test_right_requantisation_passes(right, scored, limit):
    """Weights are dequantised to bfloat16, which represents every MXFP4 value, and packed again."""
    again, _ = export.unpack()
    with torch.no_grad():
        for layer in again.each_layer():
            for name, (weight, _) in layer.experts.served().items():
                values = weight.to(torch.bfloat16)
                assert torch.equal(values.float(), weight)
                getattr(layer.experts, name).copy_(mxfp4.dequantize(*mxfp4.quantize(values)) / gains()[name][0])
    bits = faults.bits_per_byte(again, scored)
    assert bits == pytest.approx(right, rel=1e-3)
    assert bits < limit


def test_row_0_is_scored_as_one_of_its_tokens(trained, scored):
    with torch.no_grad():
        logits = trained(torch.zeros(1, 1, dtype=torch.long)).logits[0, 0].double()
    total = torch.logsumexp(torch.cat([logits, logits[:1] + math.log(scored.shared - 1)]), 0)
    losses = faults.losses(logits[None], torch.tensor([0]), scored.shared)
    assert losses.item() == pytest.approx((total - logits[0]).item())
