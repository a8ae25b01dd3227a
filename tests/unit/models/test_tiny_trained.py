"""The trained tiny model as committed: small, whole, and the same bytes everywhere."""

import hashlib

import pytest
from expected import refused

from sparkforge.core.errors import InputError
from sparkforge.models import recipes, tiny


def test_the_same_bytes_are_written_everywhere():
    # Change the hashes only if tiny.safetensors is replaced on purpose or EXPANSION is increased.
    written = tiny._weight_files(tiny.TRAINED)
    assert {name: hashlib.sha256(data).hexdigest()[:16] for name, data in written.items() if "of-" in name} == {
        "model-00001-of-00002.safetensors": "a8f184651f570030",
        "model-00002-of-00002.safetensors": "6c9e040cb5529276",
    }


def test_the_recipe_has_the_sizes_of_the_file():
    written, recipe = tiny.config(tiny.sizes()), recipes.load()["tiny-gpt-oss"].config
    assert {name: written[name] for name in recipe if name != "quantization_config"} | {
        "quantization_config": {"quant_method": written["quantization_config"]["quant_method"]}
    } == recipe


TENSOR = '"x": {"dtype": %s, "shape": [2], "data_offsets": [0, %d]}'


@pytest.mark.parametrize(
    "header",
    [
        None,  # no file
        "{", "{}", '{"__metadata__": {"sizes": "[1]"}}',
        '{"__metadata__": {"sizes": "{}"}, ' + TENSOR % ('"F99"', 2) + "}",
        '{"__metadata__": {"sizes": "{}"}, ' + TENSOR % ('"U8"', 1) + "}",
    ],
)  # fmt: skip
def test_a_damaged_or_missing_file_is_told(tmp_path, tiny_file, header):
    if header is not None:
        tiny_file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with refused("input.model", r"git checkout sparkforge/models/tiny\.safetensors"):
        dict(tiny.tensors())
    if header is None:
        assert tiny.main([str(tmp_path / "out")]) == InputError.exit_code
