"""A folder without weights has the real models' configuration and a complete tokenizer."""

import pytest

from lab.served import dummy


@pytest.mark.parametrize(("size", "layers", "experts", "billions"), [("20b", 24, 32, 20.9), ("120b", 36, 128, 116.8)])
def test_the_configuration_has_the_published_number_of_parameters(size, layers, experts, billions):
    config = dummy.config(size)
    assert (config["num_hidden_layers"], config["num_local_experts"]) == (layers, experts)
    assert len(config["layer_types"]) == layers
    hidden, inner, heads, keys, head = (
        config[key]
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    expert = 3 * hidden * inner + 2 * inner + hidden
    attention = 2 * hidden * heads * head + 2 * hidden * keys * head + (heads + 2 * keys) * head + hidden + heads
    layer = experts * expert + attention + (hidden + 1) * experts + 2 * hidden
    total = layers * layer + 2 * config["vocab_size"] * hidden + hidden
    # gpt-oss model card, table 1: 20.91 and 116.83 billion parameters.
    assert total / 1e9 == pytest.approx(billions, abs=0.05)
