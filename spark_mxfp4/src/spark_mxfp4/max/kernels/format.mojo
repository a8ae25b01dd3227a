"""The MXFP4 format and its expansion in registers, without a table. 32 E2M1 elements share one E8M0 scale.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0). Two elements share a
byte, the first in the low nibble. If an element times its scale is 2^128 or more, the result is infinite. Scale byte
255 makes its 32 values NaN.

Kernels take activations in *paired order*: every eight columns 0 … 7 are stored as 0 4 1 5 2 6 3 7. Masks and
multiplications then turn the eight nibbles of a word into the pairs (0, 4), (1, 5), (2, 6), (3, 7), because nibbles i
and i + 4 are 16 bits apart.
"""

from std.memory import bitcast
from std.sys import inlined_assembly

comptime BLOCK = 32  # elements of one scale
comptime SCALE_NAN = 255


@always_inline
def expand[width: Int](codes: SIMD[DType.uint8, width], scale: UInt8) -> SIMD[DType.float32, width]:
    """Returns E2M1 `codes` (0 … 15) times 2^(scale - 127), exact also for subnormals, without a multiplication."""
    var code = codes.cast[DType.int32]()
    var magnitude = code & 7
    var is_one_or_more = magnitude.ge(2)
    # The value 0.5 is 2^-1. The values 1, 1.5, 2, 3, 4 and 6 have the exponents 0, 0, 1, 1, 2 and 2; the code's
    # low bit is their mantissa.
    var exponent = is_one_or_more.select((magnitude >> 1) - 1, SIMD[DType.int32, width](-1)) + scale.cast[DType.int32]()
    var mantissa = is_one_or_more.select((magnitude & 1) << 22, SIMD[DType.int32, width](0))
    var normal = (exponent << 23) | mantissa
    var subnormal = (mantissa | 0x800000) >> max(1 - exponent, SIMD[DType.int32, width](0))
    var bits = exponent.ge(1).select(normal, subnormal)
    bits = exponent.ge(255).select(SIMD[DType.int32, width](0x7F800000), bits)
    bits = magnitude.eq(0).select(SIMD[DType.int32, width](0), bits)
    if scale == SCALE_NAN:
        bits = SIMD[DType.int32, width](0x7FC00000)
    return bitcast[DType.float32, width](bits | ((code & 8) << 28))


@always_inline
def to_bfloat16[width: Int](values: SIMD[DType.float32, width]) -> SIMD[DType.bfloat16, width]:
    """Converts values that bfloat16 holds exactly, by a shift, because a cast flushes subnormals on some CPUs."""
    return bitcast[DType.bfloat16, width]((bitcast[DType.uint32, width](values) >> 16).cast[DType.uint16]())


@always_inline
def expand_block[dtype: DType](blocks: SIMD[DType.uint8, 16], scale: UInt8) -> SIMD[dtype, 32]:
    """Returns the 32 elements of one block in order, as float32 or bfloat16."""
    comptime assert dtype == DType.float32 or dtype == DType.bfloat16, "MXFP4 expands to float32 or bfloat16"
    var low = expand[16](blocks & 15, scale)
    var values = low.interleave(expand[16](blocks >> 4, scale))
    comptime if dtype == DType.bfloat16:
        return rebind[SIMD[dtype, 32]](to_bfloat16[32](values))
    else:
        return rebind[SIMD[dtype, 32]](values)


@always_inline
def multiply_pairs(a: UInt32, b: UInt32) -> UInt32:
    """Returns the products of two pairs of bfloat16, rounded to nearest, subnormals kept. NVIDIA GPUs only."""
    return inlined_assembly["mul.rn.bf16x2 $0, $1, $2;", UInt32, constraints="=r,r,r", has_side_effect=False](a, b)


@always_inline
def scale_factors(scale: UInt32) -> Tuple[UInt32, UInt32]:
    """Returns two bfloat16 factors, each twice in a word, whose product is 2^(scale - 1); NaN for scale byte 255.

    The product includes 2^126, because `expand_pairs` returns elements times 2^-126. The second factor is 1 unless the
    scale byte is above 128 (2^2 or more). Then one factor is not enough, because bfloat16 ends before 2^128.
    """
    var first = min(scale + 126, UInt32(254)) << 7
    var second = (max(scale, UInt32(128)) - 1) << 7
    if scale == SCALE_NAN:
        first = 0x7FC0
    return (first * 0x10001, second * 0x10001)


@always_inline
def expand_pairs(word: UInt32) -> SIMD[DType.uint32, 4]:
    """Expands eight nibbles to four pairs of bfloat16, elements (i, i + 4), times 2^-126; zeros keep their signs."""
    # One multiplication moves a nibble's sign and its other bits to their places, because shifts and masks share a unit
    # that limits the expansion.
    comptime BOTH = UInt32(0x81C081C0)  # the sign, two exponent bits and one mantissa bit of both halves
    var upper = word >> 8
    return SIMD[DType.uint32, 4](
        ((word & 0x000F000F) * 0x1040) & BOTH,
        ((word & 0x00F000F0) * 0x0104) & BOTH,
        ((upper & 0x000F000F) * 0x1040) & BOTH,
        ((upper & 0x00F000F0) * 0x0104) & BOTH,
    )
