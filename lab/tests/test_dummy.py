"""A folder without weights has the real models' configuration and a complete tokenizer."""

import pytest

from lab.served import dummy
from sparkforge.plan.architecture import parse


@pytest.mark.parametrize(("size", "layers", "experts", "billions"), [("20b", 24, 32, 20.9), ("120b", 36, 128, 116.8)])
def test_the_configuration_has_the_published_number_of_parameters(size, layers, experts, billions):
    config = dummy.config(size)
    assert (config["num_hidden_layers"], len(config["layer_types"]), config["num_local_experts"]) == (
        layers,
        layers,
        experts,
    )
    total = sum(part.count + part.plain for part in parse(config, "test").parts())
    assert total / 1e9 == pytest.approx(billions, abs=0.05)  # gpt-oss model card, table 1: 20.91 and 116.83
