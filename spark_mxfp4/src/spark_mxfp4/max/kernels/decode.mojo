"""The kernel for few tokens per expert: a thread block reads 64 weight rows once, for up to 64 tokens."""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from std.sys.info import _accelerator_arch
from std.utils import StaticTuple

from .groups import find_tile, tile_limit
from .narrow import RING_BYTES as NARROW_BYTES, multiply_narrow_tile
from .product import Bytes, Shape, multiply_tile

comptime TOKENS = 64
# The fewer tokens, the more stages, so that the four blocks of an SM together keep about 100 kB of copies in flight.
comptime UP_TO_8 = Shape[1, 1, 4, 1, 7]()
comptime UP_TO_16 = Shape[1, 2, 4, 1, 5]()
comptime UP_TO_32 = Shape[1, 4, 4, 1, 3]()
comptime UP_TO_64 = Shape[1, 8, 4, 1, 2]()
# Blocks per SM: as many as fit in shared memory, which has 227 kB on Hopper and 100 kB on compute capability 12.x. More
# blocks leave fewer registers to a thread.
comptime IS_HOPPER = "90" in _accelerator_arch()
comptime BLOCKS = 4 if IS_HOPPER else 2
comptime ROWS = UP_TO_8.rows
comptime THREADS = UP_TO_8.threads
comptime RING_BYTES = max(
    max(UP_TO_8.ring_bytes, UP_TO_16.ring_bytes), max(UP_TO_32.ring_bytes, UP_TO_64.ring_bytes)
)


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
@__llvm_metadata(`nvvm.minctasm`=SIMDLength(BLOCKS))
def decode_kernel[
    swiglu: Bool, bias_dtype: DType, narrow: Bool
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
    """Multiplies token tile `block_idx.y` by weight row tile `block_idx.x`; arguments as in `launch_decode`."""
    var shared = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=128]()
    var tile = find_tile[TOKENS](Int(block_idx.y), starts, ids, Int(groups))
    var first_row = Int(block_idx.x) * ROWS
    var n = Int(rows)
    var k = Int(columns)
    if tile.count == 0:
        return
    comptime if narrow:
        if tile.count <= 8 and first_row + ROWS <= n:
            if multiply_narrow_tile[swiglu, bias_dtype](
                output, x, weight, scales, bias, shared, tile, first_row, n, k
            ):
                return
    if tile.count <= 8:
        multiply_tile[UP_TO_8, swiglu, bias_dtype](output, x, weight, scales, bias, shared, tile, first_row, n, k)
    elif tile.count <= 16:
        multiply_tile[UP_TO_16, swiglu, bias_dtype](output, x, weight, scales, bias, shared, tile, first_row, n, k)
    elif tile.count <= 32:
        multiply_tile[UP_TO_32, swiglu, bias_dtype](output, x, weight, scales, bias, shared, tile, first_row, n, k)
    else:
        multiply_tile[UP_TO_64, swiglu, bias_dtype](output, x, weight, scales, bias, shared, tile, first_row, n, k)


def launch_decode[
    swiglu: Bool, bias_dtype: DType, narrow: Bool = IS_HOPPER
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
    comptime kernel = decode_kernel[swiglu, bias_dtype, narrow]
    var shared = (max(RING_BYTES, NARROW_BYTES) if narrow else RING_BYTES) + ROWS * (columns // 32)
    ctx.enqueue_function[kernel](
        output, x, weight, scales, bias, starts, ids, Int32(groups), Int32(rows), Int32(columns),
        grid_dim=((rows + ROWS - 1) // ROWS, tile_limit(tokens, groups, TOKENS)),
        block_dim=THREADS,
        shared_mem_bytes=shared,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(shared)),
    )
