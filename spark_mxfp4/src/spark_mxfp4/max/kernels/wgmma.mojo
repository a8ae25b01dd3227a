"""The `wgmma` kernel for many tokens per expert: three warpgroups of 64 weight rows share up to 144 tokens.

Weights are the left operand, expanded in registers. Tokens are the right operand, in shared memory, in the paired order
in which they arrive. The instruction takes 16 columns per step, and four threads share a weight row. Of every eight
columns, thread i of the four has positions 2i and 2i + 1, which are columns i and i + 4 in paired order. So all four
threads read the same bytes of a row, each takes two nibbles of every word, and they share a block's scale.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, lane_id, thread_idx
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, async_copy, async_copy_commit_group, async_copy_wait_group, external_memory
from max.gpu.primitives.warp import shuffle_idx
from max.gpu.sync import barrier
from std.memory import bitcast
from std.sys import inlined_assembly
from std.sys.info import _accelerator_arch
from std.utils import StaticTuple

from .format import multiply_pairs, scale_factors
from .groups import Tile, find_tile, tile_limit
from .product import CHUNK_BYTES, Bytes, Shared, is_any_above_127, store
from .warpgroup import descriptor, make_visible, multiply_64, pin, wait_for_products

comptime HAS_WGMMA = "90a" in _accelerator_arch()  # if False, as on 12.x, all products use `mma.sync`
comptime WARPGROUPS = 3
comptime ROWS = 64 * WARPGROUPS
comptime THREADS = 128 * WARPGROUPS
comptime TOKENS = 144
comptime STAGES = 4  # for TOKENS tokens; with fewer tokens, as many as fit
comptime MOST_STAGES = 8
comptime WEIGHT_BYTES = ROWS * CHUNK_BYTES
comptime PLANE_TOKEN_BYTES = 128  # 64 columns of one token, the width of the swizzle
comptime TOKEN_STEP = THREADS // 16  # tokens that all threads copy at once
comptime ALIGNMENT = 1024  # for the swizzle


def plane_bytes(tokens: Int) -> Int:
    """Returns the bytes of 64 columns of `tokens` tokens, rounded up to a multiple of TOKEN_STEP tokens."""
    return (tokens + TOKEN_STEP - 1) // TOKEN_STEP * TOKEN_STEP * PLANE_TOKEN_BYTES


comptime RING_BYTES = STAGES * (WEIGHT_BYTES + 2 * plane_bytes(TOKENS))


def shared_bytes(columns: Int) -> Int:
    """Returns the bytes of shared memory that a block needs; Hopper has at most 227 KiB."""
    return ALIGNMENT + RING_BYTES + ROWS * (columns // 32)


@always_inline
def uniform(value: Int) -> Int:
    """Returns `value`, which all lanes share. Without this shuffle ptxas does not overlap `wgmma`."""
    return Int(shuffle_idx(Int32(value), UInt32(0)))


@always_inline
def multiply_tile[
    tokens: Int, one_factor: Bool, swiglu_: Bool, bias_dtype: DType
](
    output: Pointer[BFloat16, MutAnyOrigin],
    x: Bytes,
    weight: Bytes,
    scales: Bytes,
    bias: Pointer[Scalar[bias_dtype], ImmutAnyOrigin],
    shared: Shared,
    tile: Tile,
    first_row: Int,
    rows: Int,
    columns: Int,
) -> Bool:
    """Multiplies one tile of up to `tokens` tokens; arguments as in `product.multiply_tile`.

    With `one_factor`, returns False and writes nothing if a scale is above 127.
    """
    comptime PLANE = plane_bytes(tokens)
    comptime STAGE_BYTES = WEIGHT_BYTES + 2 * PLANE
    comptime STAGES = min(MOST_STAGES, RING_BYTES // STAGE_BYTES)
    comptime SUMS = tokens // 2
    var thread = Int(thread_idx.x)
    var lane = Int(lane_id())
    var group = lane // 4  # row of a fragment
    var quad = lane % 4
    var blocks = columns // 32
    var chunks = (blocks + 3) // 4
    var warp_row = thread // 32 * 16
    var expert_row = tile.expert * rows
    var tile_scales = shared.unsafe_offset(RING_BYTES)

    var valid_rows = Int32(rows - first_row)
    var valid_tokens = Int32(tile.count)
    var valid_blocks = Int32(blocks)
    var weight_stride = Int32(columns // 2)
    var thread32 = Int32(thread)

    @always_inline
    @__parameter
    def copy(at: Bytes, to: Shared, valid: Bool):
        var source = at.unsafe_address_space_cast[AddressSpace.GLOBAL]()
        async_copy[16, fill=UInt8(0), bypass_L1_16B=True](source, to, Int32(16) if valid else Int32(0))

    # A thread's copies are a multiple of 16 rows and of 8 tokens apart, so they all start from one source and one
    # destination address.
    comptime ROW_STEP = THREADS // 4
    var unit = thread32 % 4
    var row = thread32 // 4
    var fragment_row = row % 2 * 8 + row % 16 // 2
    # Eight rows of a fragment are read at once, 16 bytes each. The XOR puts rows r and r + 2 in different banks.
    var weight_to = ((row // 16 * 16 + fragment_row) * 4 + (unit ^ (fragment_row // 2 % 4))) * 16
    var weight_from = weight.unsafe_offset((expert_row + first_row) * (columns // 2) + Int(row * weight_stride + unit * 16))
    var weight_blocks = valid_blocks - unit
    var x_unit = thread32 % 16
    var token = thread32 // 16
    var x_stride = weight_stride * 4
    var x_from = x.unsafe_offset(tile.begin * columns * 2 + Int(token * x_stride + x_unit * 16))
    var x_to = Int32(WEIGHT_BYTES) + x_unit // 8 * Int32(PLANE) + token * Int32(PLANE_TOKEN_BYTES) + (x_unit % 8 ^ token % 8) * 16
    var x_blocks = valid_blocks - x_unit // 4

    var fill_at = Int32(0)  # offset of the stage that is filled next, in bytes
    var first_block = Int32(0)

    @always_inline
    @__parameter
    def fetch():
        if first_block < valid_blocks:
            var stage = shared.unsafe_offset(Int(fill_at))
            comptime for i in range(ROWS // ROW_STEP):
                copy(weight_from.unsafe_offset(Int(Int32(i * ROW_STEP) * weight_stride)),
                     stage.unsafe_offset(Int(weight_to)).unsafe_offset(i * ROW_STEP * CHUNK_BYTES),
                     first_block < weight_blocks and row + Int32(i * ROW_STEP) < valid_rows)
            comptime for i in range(PLANE // PLANE_TOKEN_BYTES // TOKEN_STEP):
                copy(x_from.unsafe_offset(Int(Int32(i * TOKEN_STEP) * x_stride)),
                     stage.unsafe_offset(Int(x_to)).unsafe_offset(i * TOKEN_STEP * PLANE_TOKEN_BYTES),
                     first_block < x_blocks and token + Int32(i * TOKEN_STEP) < valid_tokens)
            weight_from = weight_from.unsafe_offset(CHUNK_BYTES)
            x_from = x_from.unsafe_offset(2 * PLANE_TOKEN_BYTES)
        async_copy_commit_group()
        first_block += 4
        fill_at += Int32(STAGE_BYTES)
        if fill_at == Int32(STAGES * STAGE_BYTES):
            fill_at = 0

    var scales_tile = scales.unsafe_offset((expert_row + first_row) * blocks)
    var scale_units = min(ROWS, rows - first_row) * blocks // 16
    for i in range(thread, scale_units, THREADS):
        copy(scales_tile.unsafe_offset(i * 16), tile_scales.unsafe_offset(i * 16), True)
    # While one stage is multiplied, the preceding one may still be in use, so STAGES - 2 stages are in flight.
    comptime for stage in range(STAGES - 2):
        fetch()
    async_copy_wait_group(Int32(STAGES - 3))
    barrier()
    comptime if one_factor:
        if uniform(Int(is_any_above_127[THREADS](tile_scales, thread, scale_units))) != 0:
            async_copy_wait_group(Int32(0))
            barrier()
            return False

    var sums = Array[Float32, SUMS](fill=0)
    var read_at = Int32(0)
    var shared_address = UInt32(Int(shared))
    var scale_read = Array[Int32, 2](fill=0)
    comptime for half in range(2):
        scale_read[half] = Int32(min(warp_row + 2 * group + half, rows - first_row - 1) * blocks)
    var weight_read = Int32((warp_row + group) * CHUNK_BYTES)
    var swizzle = Int32(group // 2 % 4)
    var shift_sign = UInt32(12 - 4 * quad)
    var shift_rest = UInt32((38 - 4 * quad) % 32)

    @always_inline
    @__parameter
    def expand_64(half: Int, chunk: Int) -> Array[UInt32, 16]:
        """Returns this thread's part of 64 x 64 weights, four fragments of the left operand."""
        var a = Array[UInt32, 16](fill=0)
        var stage = shared.unsafe_offset(Int(read_at))
        comptime for second in range(2):
            var block = min(Int32(chunk * 4 + half * 2 + second), valid_blocks - 1)  # past the end weights are zeros
            comptime for odd in range(2):
                var at = weight_read + Int32(odd * 8 * CHUNK_BYTES) + (Int32(half * 2 + second) ^ swizzle) * 16
                var words = bitcast[DType.uint32, 4](
                    stage.unsafe_offset(Int(at)).unsafe_load[width=16, alignment=16]()
                )
                var scale = tile_scales[unsafe_offset=Int(scale_read[odd] + block)].cast[DType.uint32]()
                var factors = (scale * 0x00800080 + 0x3F003F00, UInt32(0))
                comptime if not one_factor:
                    factors = scale_factors(scale)
                comptime for word in range(4):
                    var pair = (rotate_left(words[word], shift_sign) & 0x80008000) | (
                        rotate_left(words[word], shift_rest) & 0x01C001C0
                    )
                    pair = multiply_pairs(pair, factors[0])
                    comptime if not one_factor:
                        pair = multiply_pairs(pair, factors[1])
                    # A step takes two words: rows i and i + 8 of the first, then of the second.
                    a[8 * second + word // 2 * 4 + word % 2 * 2 + odd] = pair
        comptime for i in range(16):
            a[i] = pin(a[i])
        return a^

    for chunk in range(chunks):
        async_copy_wait_group(Int32(STAGES - 3))
        make_visible()
        barrier()
        fetch()
        var b = descriptor(shared_address + UInt32(read_at) + UInt32(WEIGHT_BYTES))
        var first = expand_64(0, chunk)
        multiply_64[tokens](sums, first, b)
        wait_for_products[1]()
        var second = expand_64(1, chunk)
        multiply_64[tokens](sums, second, b + Int64(PLANE // 16))
        wait_for_products[1]()
        read_at += Int32(STAGE_BYTES)
        if read_at == Int32(STAGES * STAGE_BYTES):
            read_at = 0
    wait_for_products[0]()
    comptime for i in range(SUMS):
        sums[i] = pin(sums[i])

    var out_row = first_row + warp_row + 2 * group
    if out_row < rows:
        var bias_even = bias[unsafe_offset=expert_row + out_row].cast[DType.float32]()
        var bias_odd = bias[unsafe_offset=expert_row + out_row + 1].cast[DType.float32]()
        comptime for n in range(tokens // 8):
            comptime for column in range(2):
                var out_token = n * 8 + 2 * quad + column
                if out_token < tile.count:
                    var even = sums[4 * n + column] + bias_even
                    var odd = sums[4 * n + 2 + column] + bias_odd
                    store[swiglu_](output, tile.begin + out_token, out_row, rows, even, odd)
    return True


@always_inline
def rotate_left(word: UInt32, bits: UInt32) -> UInt32:
    """Returns `word` rotated left by `bits` < 32."""
    return inlined_assembly["shf.l.wrap.b32 $0, $1, $1, $2;", UInt32, constraints="=r,r,r", has_side_effect=False](
        word, bits
    )


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
@__llvm_metadata(`nvvm.minctasm`=SIMDLength(1))
def wgmma_kernel[
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
    """Multiplies token tile `block_idx.y` by weight row tile `block_idx.x`; arguments as in `launch_wgmma`."""
    comptime if HAS_WGMMA:
        var memory = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=ALIGNMENT]()
        var shared = memory.unsafe_offset(-Int(memory) & (ALIGNMENT - 1))
        var found = find_tile[TOKENS, even=True](Int(block_idx.y), starts, ids, Int(groups))
        var tile = Tile(uniform(found.expert), uniform(found.begin), uniform(found.count))
        var first_row = Int(block_idx.x) * ROWS
        var n = Int(rows)
        var k = Int(columns)
        if tile.count == 0:
            return
        var is_done: Bool
        if tile.count <= 32:
            is_done = multiply_tile[32, True, swiglu, bias_dtype](
                output, x, weight, scales, bias, shared, tile, first_row, n, k
            )
        elif tile.count <= 64:
            is_done = multiply_tile[64, True, swiglu, bias_dtype](
                output, x, weight, scales, bias, shared, tile, first_row, n, k
            )
        elif tile.count <= 96:
            is_done = multiply_tile[96, True, swiglu, bias_dtype](
                output, x, weight, scales, bias, shared, tile, first_row, n, k
            )
        elif tile.count <= 128:
            is_done = multiply_tile[128, True, swiglu, bias_dtype](
                output, x, weight, scales, bias, shared, tile, first_row, n, k
            )
        else:
            is_done = multiply_tile[TOKENS, True, swiglu, bias_dtype](
                output, x, weight, scales, bias, shared, tile, first_row, n, k
            )
        if not is_done:
            _ = multiply_tile[TOKENS, False, swiglu, bias_dtype](
                output, x, weight, scales, bias, shared, tile, first_row, n, k
            )


def launch_wgmma[
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
    comptime kernel = wgmma_kernel[swiglu, bias_dtype]
    var shared = shared_bytes(columns)
    ctx.enqueue_function[kernel](
        output, x, weight, scales, bias, starts, ids, Int32(groups), Int32(rows), Int32(columns),
        grid_dim=((rows + ROWS - 1) // ROWS, tile_limit(tokens, groups, TOKENS)),
        block_dim=THREADS,
        shared_mem_bytes=shared,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(shared)),
    )
