"""Every load has a shape, and the table names only shapes that exist."""

import re
from pathlib import Path

import pytest

from spark_mxfp4.kernels import fused, tuning

FOLDER = Path(fused.__file__).parent


def known_shapes():
    shapes = re.findall(r"SPARK_UNIT\((\d+), (.*)\)", (FOLDER / "shapes.cuh").read_text(encoding="utf-8"))
    return {int(number): [int(field) for field in fields.split(",")] for number, fields in shapes}


def test_every_shape_has_its_file_and_numbers_have_no_gap():
    numbers = sorted(known_shapes())
    assert numbers == list(range(len(numbers)))
    for number in numbers:
        text = (FOLDER / "hopper_units" / f"shape_{number}.cu").read_text(encoding="utf-8")
        assert f"#define SPARK_NUMBER {number}\n" in text
    assert len(list((FOLDER / "hopper_units").glob("*.cu"))) == len(numbers)


@pytest.mark.parametrize("experts", [1, 32, 128, 512])
@pytest.mark.parametrize("pairs", [1, 4, 5, 64, 513, 4096, 32768, 131072])
def test_every_load_has_shapes_that_exist_and_hold_at_least_a_quarter_of_an_expert(pairs, experts):
    shapes, sizes = known_shapes(), tuning.LaidOut(experts, 2880, 2880)
    for number in tuning.shapes("NVIDIA H200", pairs, sizes):
        tokens = shapes[number][3]
        assert tokens * 4 >= min(pairs / experts, 4 * 144)
    assert tuning.shapes("no such GPU", pairs, sizes) == tuning.shapes("NVIDIA H200", pairs, sizes)


@pytest.mark.parametrize("device", ["NVIDIA GB10", "another"])
def test_triton_tiles_fit_the_format_and_only_gb10_has_scaled_ones(device):
    for pairs in (1, 128, 4096, 10**6):
        tiles = fused.Tiles(**tuning.tiles(device, pairs, 128))
        assert tiles.columns % 32 == 0
        assert not tiles.scaled or device == "NVIDIA GB10"
