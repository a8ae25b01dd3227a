"""MXFP8 against fractions in plain Python: elements round to nearest, ties to even; scales follow the specification."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_mxfp4.mxfp4 import dequantize_mxfp8, quantize_mxfp8

# OCP MX v1.0, 5.3.1: E4M3 has bias 7, subnormals, no infinity; 0x7F is NaN. By code, for the sign bit 0.
E4M3 = [
    Fraction(code & 7, 8) * Fraction(2) ** -6
    if code < 8
    else (1 + Fraction(code & 7, 8)) * Fraction(2) ** (code // 8 - 7)
    for code in range(127)
]


def nearest_code(value):
    magnitude = min(abs(value), E4M3[-1])
    best = min(range(127), key=lambda code: (abs(E4M3[code] - magnitude), code % 2))
    return best | (0x80 if value < 0 else 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_scale_and_elements_are_those_of_the_specification(values):
    elements, scales = quantize_mxfp8(torch.tensor(values))
    largest = max(abs(Fraction(value)) for value in values)
    power = -127
    if largest:
        power = max(-127, min(127, math.frexp(float(largest))[1] - 1 - 8))
    assert scales.item() == power + 127
    for got, value in zip(elements.view(torch.uint8).tolist(), values, strict=True):
        wanted = nearest_code(Fraction(value) / Fraction(2) ** power)
        assert got == wanted or (value == 0 and got & 0x7F == 0)


def test_ties_round_to_even_and_large_values_saturate():
    x = torch.zeros(32)
    x[:6] = torch.tensor([256.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10])  # 256 = 2^8 makes the scale 1
    elements, scales = quantize_mxfp8(x)
    assert scales.item() == 127
    assert elements.float()[:6].tolist() == [256.0, 16.0, 20.0, -16.0, 0.0, 2.0**-8]
    assert quantize_mxfp8(torch.full((32,), 511.0))[0].float().tolist() == [448.0] * 32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_nan_or_infinity_is_nan_as_a_whole_and_its_neighbour_is_not(bad):
    x = torch.ones(64)
    x[3] = bad
    elements, scales = quantize_mxfp8(x)
    assert scales.tolist() == [255, 127 - 8]
    assert not elements[:32].view(torch.uint8).any()
    back = dequantize_mxfp8(elements, scales)
    assert back[:32].isnan().all()
    assert torch.equal(back[32:], torch.ones(32))


def test_wrong_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="not a multiple of 32"):
        quantize_mxfp8(torch.zeros(33))
    with pytest.raises(ValueError, match="MXFP8 shapes disagree"):
        dequantize_mxfp8(torch.zeros(64), torch.zeros(2, dtype=torch.uint8))
