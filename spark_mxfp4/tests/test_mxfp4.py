"""MXFP4 against a slow reference in plain Python: fractions, no torch arithmetic, no shared tables."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from spark_mxfp4.mxfp4 import BLOCK, dequantize, quantize

FINITE = [torch.float32, torch.bfloat16, torch.float16]
floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def element(code: int) -> Fraction:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = Fraction(mantissa, 2) if exponent == 0 else Fraction(2 + mantissa, 2) * 2 ** (exponent - 1)
    return -magnitude if sign else magnitude


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def float32_of(value: Fraction) -> float:
    return math.copysign(math.inf, value) if abs(value) >= power(128) else float(value)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize])


def every_byte(scale: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(256, dtype=torch.uint8).view(1, 16, 16), torch.full((1, 16), scale, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [*FINITE, torch.float64], ids=str)
def test_dequantize_is_exact_on_all_bytes_and_all_scales_and_255_is_nan_for_its_block_only(dtype):
    codes = [code for byte in range(256) for code in (byte & 15, byte >> 4)]
    for scale in range(255):
        exact = [element(code) * power(scale - 127) for code in codes]
        wide = [float(v) if dtype == torch.float64 else float32_of(v) for v in exact]
        wanted = torch.tensor(wide, dtype=torch.float64).to(dtype)
        negative = torch.tensor([code >= 8 for code in codes])
        got = dequantize(*every_byte(scale), dtype)[0]
        assert got.shape == (512,)
        assert torch.equal(got, wanted), f"scale {scale}"
        assert torch.equal(torch.signbit(got), negative), f"signs at scale {scale}"
    blocks, scales = torch.arange(32, dtype=torch.uint8).view(2, 16), torch.tensor([255, 127], dtype=torch.uint8)
    assert dequantize(blocks, scales, dtype).view(2, 32).isnan().all(1).tolist() == [True, False]
    assert dequantize(blocks, scales, dtype)[32:].isfinite().all()


def slow_quantize_block(values: list[float]) -> tuple[list[int], int]:
    if not all(math.isfinite(v) for v in values):
        return [0] * len(values), 255
    exact = [Fraction(v) for v in values]
    largest = max(abs(v) for v in exact)
    exponent = -127 if largest == 0 else min(127, max(-127, floor_log2(largest) - 2))
    return [slow_code(value, original, exponent) for value, original in zip(exact, values, strict=True)], exponent + 127


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length() + 1
    while power(exponent) > value:
        exponent -= 1
    return exponent


def slow_code(value: Fraction, original: float, exponent: int) -> int:
    scaled = abs(value) / power(exponent)
    # Nearest; of two at the same distance, the even code, whose mantissa bit is 0.
    code = min(range(8), key=lambda c: (abs(element(c) - scaled), c & 1))
    return code | (8 if math.copysign(1.0, original) < 0 else 0)


def check_against_slow(values: torch.Tensor) -> None:
    blocks, scales = quantize(values)
    assert blocks.dtype == scales.dtype == torch.uint8
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    for block, got, scale in zip(values.double().view(-1, BLOCK), codes.view(-1, BLOCK), scales.flatten(), strict=True):
        wanted_codes, wanted_scale = slow_quantize_block(block.tolist())
        assert int(scale) == wanted_scale
        assert got.tolist() == wanted_codes


@hypothesis_settings(max_examples=150, deadline=None)
@example([math.ldexp(2 - 2.0**-23, 127)] * BLOCK)  # the largest float32, the smallest, zeros with their signs
@example([2.0**-149] * BLOCK)
@example([0.0, -0.0] * 16)
@example([7.99, -7.99, 6.01, 1.0] * 8)
@given(st.lists(floats32, min_size=BLOCK, max_size=BLOCK))
def test_quantize_equals_the_slow_reference_on_any_floats(values):
    check_against_slow(torch.tensor(values, dtype=torch.float32))


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-64, 64), min_size=BLOCK, max_size=BLOCK), st.integers(-149, 120))
def test_quantize_equals_the_slow_reference_near_and_on_ties(numbers, exponent):
    values = [math.ldexp(n / 8, exponent) for n in numbers]
    check_against_slow(torch.tensor(values, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_boundary_rounds_to_nearest_even(dtype):
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    beside = torch.tensor(middles, dtype=dtype)
    above = torch.nextafter(beside, torch.full_like(beside, 100))
    below = torch.nextafter(beside, torch.zeros_like(beside))
    values = torch.cat([beside, above, below, -beside, torch.tensor([6.0, 4, -6, 0], dtype=dtype)])
    check_against_slow(values)
    blocks, scales = quantize(values)
    assert scales.tolist() == [127]
    assert dequantize(blocks, scales)[:7].tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_nan_or_infinity_makes_its_block_nan_and_no_other(poison):
    values = torch.ones(2 * BLOCK)
    values[5] = poison
    blocks, scales = quantize(values)
    assert scales.tolist() == [255, 125]
    assert blocks[0].eq(0).all()
    got = dequantize(blocks, scales)
    assert got[:BLOCK].isnan().all()
    assert got[BLOCK:].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_requantizing_loses_no_finite_value_at_any_scale(dtype):
    generator = torch.Generator().manual_seed(1)
    scales = torch.arange(253, dtype=torch.uint8).unsqueeze(-1).expand(253, 4).contiguous()
    blocks = torch.randint(0, 256, (253, 4, 16), dtype=torch.uint8, generator=generator)
    for largest in range(8):  # blocks whose largest element is any of the eight magnitudes
        codes = torch.stack([blocks & 15, blocks >> 4], -1)
        codes = (codes & 8) | (codes & 7).clamp(max=largest)
        values = dequantize(codes[..., 0] | codes[..., 1] << 4, scales, dtype)
        assert values.isfinite().all()
        again = dequantize(*quantize(values), dtype)
        assert torch.equal(bits(again), bits(values)), f"largest code {largest}"


def test_leading_axes_are_kept_and_non_contiguous_inputs_give_the_same():
    for lead in ((), (3,), (2, 5), (0,)):
        values = torch.randn(*lead, 96)
        blocks, scales = quantize(values)
        assert (blocks.shape, scales.shape) == ((*lead, 3, 16), (*lead, 3))
        assert dequantize(blocks, scales).shape == values.shape
    values = torch.randn(64, 8).t()
    blocks, scales = quantize(values)
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest((blocks, scales), quantize(values.contiguous())))
    assert torch.equal(dequantize(blocks[::2], scales[::2]), dequantize(blocks, scales)[::2])


def test_all_float16_inputs_match_float32():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()]
    every = every[: len(every) // BLOCK * BLOCK]
    assert all(torch.equal(a, b) for a, b in zip(quantize(every), quantize(every.float()), strict=True))


BYTES = torch.zeros(2, 16, dtype=torch.uint8)
REFUSED = [
    (dequantize, (BYTES, BYTES[0, :3]), "·"), (dequantize, (BYTES[:, :8], BYTES[:, 0]), "·"),
    (dequantize, (BYTES.float(), BYTES[:, 0]), "·"), (dequantize, (BYTES, BYTES[:, 0].char()), "·"),
    (dequantize, (BYTES, BYTES[:, 0], torch.int8), r"torch\.int8"), (quantize, (torch.zeros(33),), "multiple of 32"),
    (quantize, (torch.tensor(1.0),), "multiple of 32"),
    (quantize, (torch.zeros(32, dtype=torch.int32),), r"torch\.int32"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSED)
def test_wrong_shapes_and_dtypes_are_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
