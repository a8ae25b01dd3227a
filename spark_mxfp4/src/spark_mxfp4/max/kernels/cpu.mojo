"""The products of packed MXFP4 weights on a CPU, with float32 sums, for tests and small models."""


from .format import BLOCK, expand_block
from .product import swiglu


@always_inline
def paired(column: Int) -> Int:
    """Returns the index of `column` in paired order (see `format`)."""
    return column // 8 * 8 + column % 4 * 2 + column % 8 // 4


@always_inline
def dot[
    dtype: DType, in_pairs: Bool
](
    x: Pointer[Scalar[dtype], ImmutAnyOrigin],
    weight: Pointer[UInt8, ImmutAnyOrigin],
    scales: Pointer[UInt8, ImmutAnyOrigin],
    columns: Int,
) -> Float32:
    """Returns the dot product of one row of activations and one packed weight row.

    With `in_pairs`, `x` is in paired order. Loads assume no alignment, because MAX maps weights from the file, where
    they can start at any byte.
    """
    var sums = SIMD[DType.float32, BLOCK](0)
    for block in range(columns // BLOCK):
        var packed = weight.unsafe_offset(block * 16).unsafe_load[width=16, alignment=1]()
        var values = expand_block[DType.float32](packed, scales[unsafe_offset=block])
        var inputs = x.unsafe_offset(block * BLOCK).unsafe_load[width=BLOCK, alignment=1]().cast[DType.float32]()
        comptime if in_pairs:
            var ordered = SIMD[DType.float32, BLOCK](0)
            comptime for column in range(BLOCK):
                ordered[column] = inputs[column // 8 * 8 + column % 4 * 2 + column % 8 // 4]
            inputs = ordered
        sums = inputs.fma(values, sums)
    return sums.reduce_add()


def multiply_row[
    dtype: DType, swiglu_: Bool, in_pairs: Bool
](
    output: Pointer[Scalar[dtype], MutAnyOrigin],
    x: Pointer[Scalar[dtype], ImmutAnyOrigin],
    weight: Pointer[UInt8, ImmutAnyOrigin],
    scales: Pointer[UInt8, ImmutAnyOrigin],
    bias: Pointer[Scalar[dtype], ImmutAnyOrigin],
    expert: Int,
    rows: Int,
    columns: Int,
):
    """Writes the products of one row of activations and all weight rows of `expert`, plus the bias.

    With `swiglu_`, writes the activation of each pair of products instead, which is half as many values.
    """

    @always_inline
    @__parameter
    def value(row: Int) -> Float32:
        var at = expert * rows + row
        return dot[dtype, in_pairs](
            x, weight.unsafe_offset(at * (columns // 2)), scales.unsafe_offset(at * (columns // BLOCK)), columns
        ) + bias.unsafe_offset(at).unsafe_load[alignment=1]().cast[DType.float32]()

    comptime if swiglu_:
        for i in range(rows // 2):
            comptime if in_pairs:
                output[unsafe_offset=paired(i)] = swiglu(value(2 * i), value(2 * i + 1)).cast[dtype]()
            else:
                output[unsafe_offset=i] = swiglu(value(2 * i), value(2 * i + 1)).cast[dtype]()
    else:
        for row in range(rows):
            output[unsafe_offset=row] = value(row).cast[dtype]()


def mix[
    dtype: DType
](
    output: Pointer[Scalar[dtype], MutAnyOrigin],
    x: Pointer[Scalar[dtype], ImmutAnyOrigin],
    chosen: Pointer[Int32, ImmutAnyOrigin],
    routing: Pointer[Scalar[dtype], ImmutAnyOrigin],
    count: Int,
    gate_up: Pointer[UInt8, ImmutAnyOrigin],
    gate_up_scales: Pointer[UInt8, ImmutAnyOrigin],
    gate_up_bias: Pointer[Scalar[dtype], ImmutAnyOrigin],
    down: Pointer[UInt8, ImmutAnyOrigin],
    down_scales: Pointer[UInt8, ImmutAnyOrigin],
    down_bias: Pointer[Scalar[dtype], ImmutAnyOrigin],
    hidden: Int,
    inner: Int,
):
    """Writes one token's weighted sum [H] over its `count` chosen experts.

    `gate_up` is packed [E, 2I, H] and `down` packed [E, H, I].
    """
    var activated = List[Scalar[dtype]](length=inner, fill=0)
    var projected = List[Scalar[dtype]](length=hidden, fill=0)
    var sums = List[Float32](length=hidden, fill=0)
    for choice in range(count):
        var expert = Int(chosen.unsafe_offset(choice).unsafe_load[alignment=1]())
        var share = routing.unsafe_offset(choice).unsafe_load[alignment=1]().cast[DType.float32]()
        multiply_row[dtype, True, False](
            rebind[Pointer[Scalar[dtype], MutAnyOrigin]](activated.unsafe_ptr()), x,
            gate_up, gate_up_scales, gate_up_bias, expert, 2 * inner, hidden,
        )
        multiply_row[dtype, False, False](
            rebind[Pointer[Scalar[dtype], MutAnyOrigin]](projected.unsafe_ptr()),
            rebind[Pointer[Scalar[dtype], ImmutAnyOrigin]](activated.unsafe_ptr()),
            down, down_scales, down_bias, expert, hidden, inner,
        )
        for column in range(hidden):
            sums[column] += share * projected[column].cast[DType.float32]()
    for column in range(hidden):
        output[unsafe_offset=column] = sums[column].cast[dtype]()


def dequantize[
    dtype: DType
](
    output: Pointer[Scalar[dtype], MutAnyOrigin],
    blocks: Pointer[UInt8, ImmutAnyOrigin],
    scales: Pointer[UInt8, ImmutAnyOrigin],
    count: Int,
):
    """Expands `count` blocks of 16 bytes to 32 elements each."""
    for block in range(count):
        var packed = blocks.unsafe_offset(block * 16).unsafe_load[width=16, alignment=1]()
        var values = expand_block[dtype](packed, scales[unsafe_offset=block])
        output.unsafe_offset(block * BLOCK).unsafe_store[alignment=1](0, values)
