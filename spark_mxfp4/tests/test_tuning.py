"""Every load has a shape, and the table names only shapes that exist."""

import pytest

from spark_mxfp4.kernels import fused, hopper, tuning


@pytest.mark.parametrize("experts", [1, 32, 128, 512])
@pytest.mark.parametrize("pairs", [1, 4, 5, 64, 513, 4096, 32768, 131072])
def test_every_load_has_shapes_that_exist_and_hold_at_least_a_quarter_of_an_expert(pairs, experts):
    sizes = tuning.LaidOut(experts, 2880, 2880)
    chosen = tuning.shapes("NVIDIA H200", pairs, sizes)
    for number in chosen or ():
        assert hopper.GROUPED[number].tokens * 4 >= min(pairs / experts, 4 * 192)
    assert tuning.shapes("no such GPU", pairs, sizes) == chosen


@pytest.mark.parametrize(
    ("pairs", "experts", "intermediate", "one_launch"),
    [(4, 128, 2880, True), (64, 128, 2880, True), (77, 128, 2880, False), (32, 16, 2048, True), (33, 16, 2048, False),
     (4, 1, 2880, False), (2, 1, 2880, True), (256, 128, 768, True), (256, 128, 2048, False), (257, 256, 768, False),
     (129, 64, 768, False)],
)  # fmt: skip
def test_few_pairs_take_one_launch_unless_an_expert_would_get_many_tiles(pairs, experts, intermediate, one_launch):
    sizes = tuning.LaidOut(experts, 2048, intermediate)
    assert (tuning.default_shapes("NVIDIA H200", pairs, sizes) is None) == one_launch


@pytest.mark.parametrize(
    ("first_row_tiles", "second", "plans"),
    [
        (90, (45, 45), {4: (3, 2), 8: (1, 2), 16: (2, 2), 32: (2, 2), 64: (2, 1)}),  # gpt-oss
        (64, (96, 32), {2: (1, 2), 4: (1, 2), 8: (1, 1), 16: (2, 2)}),  # 16 experts, 6144 x 2048
        (24, (32, 12), {8: (1, 1), 16: (1, 1), 32: (2, 1), 64: (2, 1)}),  # 256 experts, 2048 x 768
    ],
)
def test_plans_are_the_fastest_measured(first_row_tiles, second, plans):
    assert {pairs: hopper.plan_layer(pairs, first_row_tiles, second, 132)[:2] for pairs in plans} == plans


@pytest.mark.parametrize("chunks", [1, 2, 12, 32, 45, 96, 225])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("step", [5, 6])
def test_parts_are_whole_steps_and_cover_all_columns(chunks, parts, step):
    each = hopper.part_of(chunks, parts, step)
    number = -(-chunks // each)
    assert (each % step, number <= parts) == (0, True)
    assert (number - 1) * each < chunks <= number * each


@pytest.mark.parametrize("device", ["NVIDIA GB10", "another"])
def test_triton_tiles_fit_the_format_and_only_gb10_has_scaled_ones(device):
    for pairs in (1, 128, 4096, 10**6):
        tiles = fused.Tiles(**tuning.tiles(device, pairs, 128))
        assert tiles.columns % 32 == 0
        assert not tiles.scaled or device == "NVIDIA GB10"
