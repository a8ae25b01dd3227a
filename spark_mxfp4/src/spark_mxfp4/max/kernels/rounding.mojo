"""Adds the bias to a product's float32 result and rounds the sum to bfloat16.

MAX 26.7.0 fuses its own cast into the product, and a product with a bfloat16 result writes whole tiles of 128 rows
(docs/max.md). MAX does not fuse custom operations, so this operation keeps the product's result in float32.
"""

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.memory import bitcast

comptime THREADS = 256
comptime WIDTH = 4  # elements per thread


@always_inline
def round_to_bfloat16(value: Float32) -> BFloat16:
    """Returns `value` rounded to nearest even. Uses integers, because a cast flushes subnormals on some CPUs."""
    var bits = bitcast[DType.uint32, 1](value)
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return bitcast[DType.bfloat16, 1](((bits >> 16) | 0x40).cast[DType.uint16]())
    return bitcast[DType.bfloat16, 1](((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).cast[DType.uint16]())


def add_and_round_kernel(
    output: Pointer[BFloat16, MutAnyOrigin],
    sums: Pointer[Float32, ImmutAnyOrigin],
    bias: Pointer[BFloat16, ImmutAnyOrigin],
    elements: Int32,
    columns: Int32,
):
    """Rounds WIDTH elements per thread. They are in one row, because `columns` is a multiple of WIDTH."""
    var first = (Int(block_idx.x) * THREADS + Int(thread_idx.x)) * WIDTH
    if first >= Int(elements):
        return
    var values = sums.unsafe_offset(first).unsafe_load[width=WIDTH, alignment=4 * WIDTH]()
    var biases = bias.unsafe_offset(first % Int(columns)).unsafe_load[width=WIDTH, alignment=2 * WIDTH]()
    output.unsafe_offset(first).unsafe_store[alignment=2 * WIDTH](
        0, (values + biases.cast[DType.float32]()).cast[DType.bfloat16]()
    )


def launch_add_and_round(
    output: Pointer[BFloat16, MutAnyOrigin],
    sums: Pointer[Float32, ImmutAnyOrigin],
    bias: Pointer[BFloat16, ImmutAnyOrigin],
    rows: Int,
    columns: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues the rounding of `sums` [rows, columns] plus `bias` [columns]."""
    var elements = rows * columns
    ctx.enqueue_function[add_and_round_kernel](
        output, sums, bias, Int32(elements), Int32(columns),
        grid_dim=(elements + THREADS * WIDTH - 1) // (THREADS * WIDTH),
        block_dim=THREADS,
    )
