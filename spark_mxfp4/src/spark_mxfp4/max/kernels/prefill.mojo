"""The kernels for many tokens per expert: with `wgmma` on Hopper, otherwise with `mma.sync`.

With `mma.sync` a thread block has 128 weight rows and up to 128 tokens; each warp has 32 rows and half the tokens.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from std.sys.info import _accelerator_arch
from std.utils import StaticTuple

from .groups import find_tile, tile_limit
from .product import Bytes, Shape, multiply_tile
from .wgmma import HAS_WGMMA, launch_wgmma, shared_bytes

comptime WGMMA_SHARED = 227 * 1024  # most bytes of shared memory of a block on Hopper
# With `mma.sync`, registers allow one block per SM. Hopper's shared memory has room for four stages of 128 tokens, the
# 99 kB of compute capability 12.x for two stages of 64 tokens.
comptime IS_HOPPER = "90" in _accelerator_arch()
comptime STAGES = 4 if IS_HOPPER else 2
comptime SHAPE = Shape[2, 8 if IS_HOPPER else 4, 4, 2, STAGES]()
# For tiles of fewer tokens, so that the last tile of a group does not cost as much as a full one.
comptime UP_TO_64 = Shape[2, 4, 4, 2, STAGES]()
comptime UP_TO_32 = Shape[2, 2, 4, 2, STAGES]()


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(SHAPE.threads)))
def mma_kernel[
    swiglu: Bool, bias_dtype: DType
](
    output: Pointer[BFloat16, MutAnyOrigin],
    x: Bytes,
    weight: Bytes,
    scales: Bytes,
    bias: Pointer[Scalar[bias_dtype], ImmutAnyOrigin],
    starts: Pointer[UInt32, ImmutAnyOrigin],
    ids: Pointer[Int32, ImmutAnyOrigin],
    groups: Int32,
    rows: Int32,
    columns: Int32,
):
    """Multiplies token tile `block_idx.y` by weight row tile `block_idx.x`; arguments as in `launch_mma`."""
    var shared = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=128]()
    var tile = find_tile[SHAPE.tokens](Int(block_idx.y), starts, ids, Int(groups))
    var first_row = Int(block_idx.x) * SHAPE.rows
    var n = Int(rows)
    var k = Int(columns)
    if tile.count == 0:
        return
    if tile.count <= 32:
        multiply_tile[UP_TO_32, swiglu, bias_dtype](output, x, weight, scales, bias, shared, tile, first_row, n, k)
    elif tile.count <= 64:
        multiply_tile[UP_TO_64, swiglu, bias_dtype](output, x, weight, scales, bias, shared, tile, first_row, n, k)
    else:
        multiply_tile[SHAPE, swiglu, bias_dtype](output, x, weight, scales, bias, shared, tile, first_row, n, k)


def launch_mma[
    swiglu: Bool, bias_dtype: DType
](
    output: Pointer[BFloat16, MutAnyOrigin],
    x: Bytes,
    weight: Bytes,
    scales: Bytes,
    bias: Pointer[Scalar[bias_dtype], ImmutAnyOrigin],
    starts: Pointer[UInt32, ImmutAnyOrigin],
    ids: Pointer[Int32, ImmutAnyOrigin],
    tokens: Int,
    groups: Int,
    rows: Int,
    columns: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues the product of `tokens` rows of `x` in `groups` groups; an expert is `rows` (N) by `columns` (K)."""
    comptime kernel = mma_kernel[swiglu, bias_dtype]
    var shared = SHAPE.ring_bytes + SHAPE.rows * (columns // 32)
    ctx.enqueue_function[kernel](
        output, x, weight, scales, bias, starts, ids, Int32(groups), Int32(rows), Int32(columns),
        grid_dim=((rows + SHAPE.rows - 1) // SHAPE.rows, tile_limit(tokens, groups, SHAPE.tokens)),
        block_dim=SHAPE.threads,
        shared_mem_bytes=shared,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(shared)),
    )


def launch_prefill[
    swiglu: Bool, bias_dtype: DType
](
    output: Pointer[BFloat16, MutAnyOrigin],
    x: Bytes,
    weight: Bytes,
    scales: Bytes,
    bias: Pointer[Scalar[bias_dtype], ImmutAnyOrigin],
    starts: Pointer[UInt32, ImmutAnyOrigin],
    ids: Pointer[Int32, ImmutAnyOrigin],
    tokens: Int,
    groups: Int,
    rows: Int,
    columns: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues the product of `tokens` rows of `x` in `groups` groups; an expert is `rows` (N) by `columns` (K)."""
    comptime if HAS_WGMMA:
        if shared_bytes(columns) <= WGMMA_SHARED:
            launch_wgmma[swiglu, bias_dtype](
                output, x, weight, scales, bias, starts, ids, tokens, groups, rows, columns, ctx
            )
            return
    launch_mma[swiglu, bias_dtype](output, x, weight, scales, bias, starts, ids, tokens, groups, rows, columns, ctx)
