"""The grouped product on NVIDIA GPUs: a tile of weight rows times a tile of activations, weights expanded in registers.

Weights are the left operand of `mma` (16 x 8 x 16, bfloat16, float32 sums). They keep the checkpoint's layout: u8
[experts, N, K/2] and scales u8 [experts, N, K/32]. A chunk is 128 columns, or 64 bytes of a weight row. Four threads
share a row in the matrix instruction; each takes 16 bytes, one block. The instruction can multiply the columns in any
order that both operands share, so threads need not exchange parts of their blocks.
Of 16 weight rows, row 2i is the instruction's row i and row 2i + 1 its row i + 8, so that one thread has both the gate
and the up of a pair.
"""

from max.gpu import lane_id, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.memory import AddressSpace, async_copy, async_copy_commit_group, async_copy_wait_group
from max.gpu.sync import barrier
from std.math import exp
from std.memory import bitcast
from std.sys import inlined_assembly
from std.sys.info import is_nvidia_gpu

from .format import expand_pairs, multiply_pairs, scale_factors
from .groups import Tile

comptime Bytes = Pointer[UInt8, ImmutAnyOrigin]
comptime Shared = Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED]
comptime CHUNK = 128  # columns
comptime CHUNK_BYTES = CHUNK // 2  # of one weight row
comptime TOKEN_BYTES = CHUNK * 2  # of one row of activations
comptime ALPHA = Float32(1.702)  # openai/gpt-oss, gpt_oss/torch/model.py: swiglu
comptime LIMIT = Float32(7.0)


@fieldwise_init
struct Shape[row_tiles: Int, token_tiles: Int, row_warps: Int, token_warps: Int, stages: Int](TrivialRegisterPassable):
    """A thread block: warps as row_warps x token_warps, each with row_tiles x 16 rows and token_tiles x 8 tokens."""

    comptime rows = Self.row_warps * Self.row_tiles * 16
    comptime tokens = Self.token_warps * Self.token_tiles * 8
    comptime threads = Self.row_warps * Self.token_warps * 32
    comptime weight_bytes = Self.rows * CHUNK_BYTES
    comptime stage_bytes = Self.weight_bytes + Self.tokens * TOKEN_BYTES
    comptime ring_bytes = Self.stages * Self.stage_bytes


@always_inline
def swiglu(gate: Float32, up: Float32) -> Float32:
    """Returns gpt-oss' activation: (up + 1) · gate · sigmoid(1.702 · gate), gate at most 7, up within ± 7."""
    var g = min(gate, LIMIT)
    var u = max(min(up, LIMIT), -LIMIT)
    var below = 1 + exp(-ALPHA * g)
    comptime if is_nvidia_gpu():
        # The error is within 2^-23. An exactly rounded division is a function call, and the result is rounded to
        # bfloat16 anyway.
        return (u + 1) * (
            g * inlined_assembly["rcp.approx.f32 $0, $1;", Float32, constraints="=f,f", has_side_effect=False](below)
        )
    else:
        return (u + 1) * (g / below)


@always_inline
def is_any_above_127[threads: Int](scales: Shared, thread: Int, units: Int) -> UInt32:
    """Returns 1 in all threads if any of `units` · 16 scale bytes is above 127, else 0. Synchronises the block."""
    var high = UInt32(0)
    for unit in range(thread, units, threads):
        var four = bitcast[DType.uint32, 4](scales.unsafe_offset(unit * 16).unsafe_load[width=16, alignment=16]())
        high |= (four[0] | four[1] | four[2] | four[3]) & 0x80808080
    return inlined_assembly[
        "{.reg .pred p, q;\nsetp.ne.u32 p, $1, 0;\nbar.red.or.pred q, 0, p;\nselp.u32 $0, 1, 0, q;}",
        UInt32,
        constraints="=r,r",
        has_side_effect=True,
    ](high)


@always_inline
def store[
    swiglu_: Bool
](output: Pointer[BFloat16, MutAnyOrigin], token: Int, row: Int, rows: Int, even: Float32, odd: Float32):
    """Writes the products of `token` and the weight rows `row`, which is even, and `row + 1`; see `multiply_tile`."""
    comptime if swiglu_:
        var column = row // 2
        var place = column // 8 * 8 + column % 4 * 2 + column % 8 // 4  # paired order
        output[unsafe_offset=token * (rows // 2) + place] = swiglu(even, odd).cast[DType.bfloat16]()
    else:
        output.unsafe_offset(token * rows + row).unsafe_store[alignment=4](
            0, SIMD[DType.float32, 2](even, odd).cast[DType.bfloat16]()
        )


@always_inline
def multiply_tile[
    shape: Shape, swiglu_: Bool, bias_dtype: DType
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
):
    """Multiplies one tile; `output` is [all tokens, rows], or with `swiglu_` [all tokens, rows/2] in paired order.

    `x` is bfloat16 [all tokens, columns] in paired order. `shared` holds `shape.ring_bytes`, then the tile's scales.
    """
    comptime ROWS = shape.rows
    comptime THREADS = shape.threads
    var thread = Int(thread_idx.x)
    var lane = Int(lane_id())
    var warp = thread // 32
    var group = lane // 4  # row of a fragment, and token
    var quad = lane % 4
    var blocks = columns // 32
    var chunks = (blocks + 3) // 4
    var warp_row = (warp % shape.row_warps) * shape.row_tiles * 16
    var warp_token = (warp // shape.row_warps) * shape.token_tiles * 8
    var expert_row = tile.expert * rows
    var tile_scales = shared.unsafe_offset(shape.ring_bytes)

    # Offsets within a tile have 32 bits; 64 would take twice the registers.
    var weight_tile = weight.unsafe_offset((expert_row + first_row) * (columns // 2))
    var x_tile = x.unsafe_offset(tile.begin * columns * 2)
    var valid_rows = Int32(rows - first_row)
    var valid_tokens = Int32(tile.count)
    var valid_blocks = Int32(blocks)
    var weight_stride = Int32(columns // 2)
    var thread32 = Int32(thread)
    comptime WEIGHT_COPIES = ROWS * 4 // THREADS
    comptime X_COPIES = shape.tokens * 16 // THREADS

    @always_inline
    @__parameter
    def copy(at: Bytes, to: Shared, valid: Bool):
        var source = at.unsafe_address_space_cast[AddressSpace.GLOBAL]()
        async_copy[16, fill=UInt8(0), bypass_L1_16B=True](source, to, Int32(16) if valid else Int32(0))

    # Values that do not depend on the column are computed once. A thread's copies are a fixed number of rows or tokens
    # apart, a multiple of 16 rows and of 2 tokens, so they all start from one source and one destination address.
    comptime ROW_STEP = THREADS // 4
    comptime TOKEN_STEP = THREADS // 16
    var row = thread32 // 4
    var weight_from = weight_tile.unsafe_offset(Int(row * weight_stride + thread32 % 4 * 16))
    var weight_to = ((row // 16 * 16 + row % 2 * 8 + row % 16 // 2) * 4 + thread32 % 4) * 16  # in the fragments' order
    var weight_blocks = valid_blocks - thread32 % 4
    var token = thread32 // 16
    var x_block = thread32 % 16 // 4
    var x_from = x_tile.unsafe_offset(Int(token * weight_stride * 4 + x_block * 64 + thread32 % 4 * 16))
    # The XOR avoids bank conflicts: a quarter warp reads two tokens.
    var x_to = Int32(shape.weight_bytes) + token * TOKEN_BYTES + ((thread32 % 4 * 4 + x_block) ^ (token % 2 * 4)) * 16
    var x_blocks = valid_blocks - x_block
    var x_stride = weight_stride * 4

    var fill_at = Int32(0)  # offset of the stage that is filled next, in bytes
    var first_block = Int32(0)

    @always_inline
    @__parameter
    def fetch():
        if first_block < valid_blocks:
            var stage = shared.unsafe_offset(Int(fill_at))
            var weight_stage = stage.unsafe_offset(Int(weight_to))
            comptime for i in range(WEIGHT_COPIES):
                copy(weight_from.unsafe_offset(Int(Int32(i * ROW_STEP) * weight_stride)),
                     weight_stage.unsafe_offset(i * ROW_STEP * CHUNK_BYTES),
                     first_block < weight_blocks and row + Int32(i * ROW_STEP) < valid_rows)
            var x_stage = stage.unsafe_offset(Int(x_to))
            comptime for i in range(X_COPIES):
                copy(x_from.unsafe_offset(Int(Int32(i * TOKEN_STEP) * x_stride)),
                     x_stage.unsafe_offset(i * TOKEN_STEP * TOKEN_BYTES),
                     first_block < x_blocks and token + Int32(i * TOKEN_STEP) < valid_tokens)
            weight_from = weight_from.unsafe_offset(CHUNK_BYTES)
            x_from = x_from.unsafe_offset(TOKEN_BYTES)
        async_copy_commit_group()
        first_block += 4
        fill_at += Int32(shape.stage_bytes)
        if fill_at == Int32(shape.ring_bytes):
            fill_at = 0

    # A tile's scales are contiguous: rows x K/32 bytes, a multiple of 16 because a tile has a multiple of 16 rows.
    var scales_tile = scales.unsafe_offset((expert_row + first_row) * blocks)
    var scale_units = min(ROWS, rows - first_row) * blocks // 16
    for unit in range(thread, scale_units, THREADS):
        copy(scales_tile.unsafe_offset(unit * 16), tile_scales.unsafe_offset(unit * 16), True)
    comptime for stage in range(shape.stages - 1):
        fetch()

    # For scale bytes below 128 one multiplication applies the scale. One test covers all bytes of the tile.
    async_copy_wait_group(Int32(shape.stages - 2))
    barrier()
    var is_any_high = is_any_above_127[THREADS](tile_scales, thread, scale_units)

    var sums = Array[SIMD[DType.float32, 4], shape.row_tiles * shape.token_tiles](
        fill=SIMD[DType.float32, 4](0)
    )
    var read_at = Int32(0)
    var weight_read = Int32(((warp_row + group) * 4 + quad) * 16)
    var parity = Int32(group % 2 * 64)
    var x_read = Int32(shape.weight_bytes + (warp_token + group) * TOKEN_BYTES + quad * 16)
    var x_even = x_read + parity
    var x_odd = x_read - parity
    var scale_read = Array[Int32, 2 * shape.row_tiles](fill=0)
    comptime for half in range(2 * shape.row_tiles):
        var row = warp_row + half // 2 * 16 + 2 * group + half % 2
        scale_read[half] = Int32(min(row, rows - first_row - 1) * blocks)

    @always_inline
    @__parameter
    def multiply[one_factor: Bool](chunk: Int):
        async_copy_wait_group(Int32(shape.stages - 2))
        barrier()
        fetch()
        var stage = shared.unsafe_offset(Int(read_at))
        read_at += Int32(shape.stage_bytes)
        if read_at == Int32(shape.ring_bytes):
            read_at = 0
        var block = min(Int32(chunk * 4 + quad), valid_blocks - 1)  # past the end both operands are zeros
        var weight_words = stage.unsafe_offset(Int(weight_read))
        var words = Array[SIMD[DType.uint32, 4], 2 * shape.row_tiles](fill=SIMD[DType.uint32, 4](0))
        var factors = Array[UInt32, 4 * shape.row_tiles](fill=UInt32(0))
        comptime for half in range(2 * shape.row_tiles):
            words[half] = bitcast[DType.uint32, 4](
                weight_words.unsafe_offset((half // 2 * 16 + half % 2 * 8) * CHUNK_BYTES)
                .unsafe_load[width=16, alignment=16]()
            )
            var scale = tile_scales[unsafe_offset=Int(scale_read[half] + block)].cast[DType.uint32]()
            comptime if one_factor:
                factors[2 * half] = scale * 0x00800080 + 0x3F003F00
            else:
                var pair = scale_factors(scale)
                factors[2 * half] = pair[0]
                factors[2 * half + 1] = pair[1]
        var x_words_even = stage.unsafe_offset(Int(x_even))
        var x_words_odd = stage.unsafe_offset(Int(x_odd))
        comptime for word in range(4):
            var a = Array[SIMD[DType.uint32, 4], 2 * shape.row_tiles](fill=SIMD[DType.uint32, 4](0))
            comptime for half in range(2 * shape.row_tiles):
                var pairs = expand_pairs(words[half][word])
                comptime for i in range(4):
                    pairs[i] = multiply_pairs(pairs[i], factors[2 * half])
                    comptime if not one_factor:
                        pairs[i] = multiply_pairs(pairs[i], factors[2 * half + 1])
                a[half] = pairs
            comptime for n in range(shape.token_tiles):
                var x_words = x_words_even if word % 2 == 0 else x_words_odd
                var b = bitcast[DType.uint32, 4](
                    x_words.unsafe_offset(n * 8 * TOKEN_BYTES + word * 64).unsafe_load[width=16, alignment=16]()
                )
                comptime for m in range(shape.row_tiles):
                    comptime for step in range(2):
                        var left = bitcast[DType.bfloat16, 8](
                            SIMD[DType.uint32, 4](
                                a[2 * m][2 * step], a[2 * m + 1][2 * step],
                                a[2 * m][2 * step + 1], a[2 * m + 1][2 * step + 1],
                            )
                        )
                        var right = bitcast[DType.bfloat16, 4](
                            SIMD[DType.uint32, 2](b[2 * step], b[2 * step + 1])
                        )
                        mma(sums[m * shape.token_tiles + n], left, right, sums[m * shape.token_tiles + n])

    if is_any_high == 0:
        for chunk in range(chunks):
            multiply[True](chunk)
    else:
        for chunk in range(chunks):
            multiply[False](chunk)

    comptime for m in range(shape.row_tiles):
        var row = first_row + warp_row + m * 16 + 2 * group
        if row < rows:
            var bias_even = bias[unsafe_offset=expert_row + row].cast[DType.float32]()
            var bias_odd = bias[unsafe_offset=expert_row + row + 1].cast[DType.float32]()
            comptime for n in range(shape.token_tiles):
                comptime for column in range(2):
                    var token = warp_token + n * 8 + 2 * quad + column
                    if token < tile.count:
                        var even = sums[m * shape.token_tiles + n][column] + bias_even
                        var odd = sums[m * shape.token_tiles + n][2 + column] + bias_odd
                        store[swiglu_](output, tile.begin + token, row, rows, even, odd)
