"""The product for up to 8 tokens per expert: each of four warps multiplies every fourth chunk of 64 weight rows.

A warp copies the data that it multiplies, so warps do not wait for each other until the end of the tile. Then their
sums are added in the order of the warps. One read of the activations serves the 64 rows.
"""

from max.gpu import lane_id, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.memory import AddressSpace, async_copy, async_copy_commit_group, async_copy_wait_group
from max.gpu.sync import barrier, syncwarp
from std.memory import bitcast

from .format import expand_pairs, multiply_pairs
from .groups import Tile
from .product import CHUNK_BYTES, TOKEN_BYTES, Bytes, Shared, is_any_above_127, store

comptime ROWS = 64
comptime TOKENS = 8
comptime WARPS = 4
comptime THREADS = WARPS * 32
comptime STAGES = 2
comptime WEIGHT_BYTES = ROWS * CHUNK_BYTES
comptime STAGE_BYTES = WEIGHT_BYTES + TOKENS * TOKEN_BYTES
comptime WARP_BYTES = STAGES * STAGE_BYTES
comptime RING_BYTES = WARPS * WARP_BYTES


@always_inline
def multiply_narrow_tile[
    swiglu_: Bool, bias_dtype: DType
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
    """Multiplies a tile that has all its 64 rows and up to 8 tokens; arguments as in `product.multiply_tile`.

    `shared` holds RING_BYTES, then the tile's scales. Returns False and writes nothing if a scale is above 127.
    """
    var thread = Int(thread_idx.x)
    var lane = Int(lane_id())
    var warp = thread // 32
    var group = lane // 4  # row of a fragment, and token
    var quad = lane % 4
    var blocks = columns // 32
    var chunks = Int32((blocks + 3) // 4)
    var expert_row = tile.expert * rows
    var tile_scales = shared.unsafe_offset(RING_BYTES)
    var ring = shared.unsafe_offset(warp * WARP_BYTES)

    var last_block = Int32(blocks - 1)
    var weight_stride = Int32(columns // 2)
    var lane32 = Int32(lane)

    @always_inline
    @__parameter
    def copy(at: Bytes, to: Shared):
        async_copy[16, bypass_L1_16B=True](at.unsafe_address_space_cast[AddressSpace.GLOBAL](), to)

    # A lane's copies are 8 rows or 2 tokens apart, so they all start from one source and one destination address.
    var unit = lane32 % 4
    var row = lane32 // 4
    var weight_tile = weight.unsafe_offset((expert_row + first_row) * (columns // 2))
    var weight_from = weight_tile.unsafe_offset(Int(row * weight_stride))
    var weight_to = ((row % 2 * 8 + row // 2) * 4 + unit) * 16  # in the fragments' order
    var token = lane32 // 16
    var x_block = lane32 % 16 // 4
    var x_from = x.unsafe_offset(
        tile.begin * columns * 2 + Int(token * weight_stride * 4 + lane32 % 16 * 16)
    )
    # The XOR avoids bank conflicts: a quarter warp reads two tokens.
    var x_to = Int32(WEIGHT_BYTES) + token * TOKEN_BYTES + ((unit * 4 + x_block) ^ (token % 2 * 4)) * 16
    var tokens = Int32(tile.count) - token

    @always_inline
    @__parameter
    def fetch(chunk: Int32, stage: Shared):
        if chunk < chunks:
            # Past the end, activations are zeros and weights repeat the last block.
            var block = min(chunk * 4 + unit, last_block)
            var from_here = weight_from.unsafe_offset(Int(block * 16))
            comptime for i in range(ROWS // 8):
                copy(
                    from_here.unsafe_offset(Int(Int32(i * 8) * weight_stride)),
                    stage.unsafe_offset(Int(weight_to)).unsafe_offset((i // 2 * 16 + i % 2 * 4) * CHUNK_BYTES),
                )
            var bytes = Int32(16) if chunk * 4 + x_block <= last_block else Int32(0)
            var x_here = x_from.unsafe_offset(Int(chunk * TOKEN_BYTES))
            comptime for i in range(TOKENS // 2):
                # Missing tokens are not copied: the bytes in their place affect only sums that are not stored.
                if tokens > Int32(i * 2):
                    async_copy[16, fill=UInt8(0), bypass_L1_16B=True](
                        x_here.unsafe_offset(Int(Int32(i * 8) * weight_stride))
                        .unsafe_address_space_cast[AddressSpace.GLOBAL](),
                        stage.unsafe_offset(Int(x_to)).unsafe_offset(i * 2 * TOKEN_BYTES), bytes,
                    )
        async_copy_commit_group()

    # A tile's scales are contiguous: 64 rows x K/32 bytes.
    var scales_tile = scales.unsafe_offset((expert_row + first_row) * blocks)
    var scale_units = ROWS * blocks // 16
    for i in range(thread, scale_units, THREADS):
        copy(scales_tile.unsafe_offset(i * 16), tile_scales.unsafe_offset(i * 16))
    comptime for stage in range(STAGES):
        fetch(Int32(warp + stage * WARPS), ring.unsafe_offset(stage * STAGE_BYTES))
    async_copy_wait_group(Int32(STAGES - 1))
    barrier()
    if is_any_above_127[THREADS](tile_scales, thread, scale_units) != 0:
        async_copy_wait_group(Int32(0))
        barrier()
        return False

    comptime ROW_TILES = ROWS // 16
    var sums = Array[SIMD[DType.float32, 4], ROW_TILES](fill=SIMD[DType.float32, 4](0))
    var weight_read = Int32((group * 4 + quad) * 16)
    var parity = Int32(group % 2 * 64)
    var x_read = Int32(WEIGHT_BYTES + group * TOKEN_BYTES + quad * 16)
    var scale_read = Int32(2 * group * blocks)

    comptime assert STAGES == 2, "stages take turns"
    var stage_at = Int32(0)
    for chunk in range(Int32(warp), chunks, Int32(WARPS)):
        async_copy_wait_group(Int32(STAGES - 1))
        syncwarp()
        var stage = ring.unsafe_offset(Int(stage_at))
        var x_words = Array[SIMD[DType.uint32, 4], 4](fill=SIMD[DType.uint32, 4](0))
        comptime for word in range(4):
            var at = x_read + parity if word % 2 == 0 else x_read - parity
            x_words[word] = bitcast[DType.uint32, 4](
                stage.unsafe_offset(Int(at)).unsafe_offset(word * 64).unsafe_load[width=16, alignment=16]()
            )
        var scale_at = scale_read + min(chunk * 4 + Int32(quad), last_block)
        # Two row tiles at a time, because matrix instructions with the same sums wait for each other.
        comptime for two in range(0, ROW_TILES, 2):
            var words = Array[SIMD[DType.uint32, 4], 4](fill=SIMD[DType.uint32, 4](0))
            var factors = Array[UInt32, 4](fill=UInt32(0))
            comptime for half in range(4):
                words[half] = bitcast[DType.uint32, 4](
                    stage.unsafe_offset(Int(weight_read))
                    .unsafe_offset(((two + half // 2) * 16 + half % 2 * 8) * CHUNK_BYTES)
                    .unsafe_load[width=16, alignment=16]()
                )
                var scale = tile_scales[
                    unsafe_offset=Int(scale_at + Int32(((two + half // 2) * 16 + half % 2) * blocks))
                ].cast[DType.uint32]()
                factors[half] = scale * 0x00800080 + 0x3F003F00  # the first of `scale_factors`; the second is 1
            comptime for word in range(4):
                comptime for m in range(2):
                    var a = Array[SIMD[DType.uint32, 4], 2](fill=SIMD[DType.uint32, 4](0))
                    comptime for odd in range(2):
                        var pairs = expand_pairs(words[2 * m + odd][word])
                        comptime for i in range(4):
                            pairs[i] = multiply_pairs(pairs[i], factors[2 * m + odd])
                        a[odd] = pairs
                    comptime for step in range(2):
                        var left = bitcast[DType.bfloat16, 8](
                            SIMD[DType.uint32, 4](
                                a[0][2 * step], a[1][2 * step], a[0][2 * step + 1], a[1][2 * step + 1]
                            )
                        )
                        var right = bitcast[DType.bfloat16, 4](
                            SIMD[DType.uint32, 2](x_words[word][2 * step], x_words[word][2 * step + 1])
                        )
                        mma(sums[two + m], left, right, sums[two + m])
        syncwarp()
        fetch(chunk + Int32(STAGES * WARPS), stage)
        stage_at = Int32(STAGE_BYTES) - stage_at

    # Each warp stores all its sums to its own part of the ring, which no other warp has read. Then it adds one row tile
    # of all warps.
    async_copy_wait_group(Int32(0))
    syncwarp()
    comptime for m in range(ROW_TILES):
        ring.unsafe_offset(m * 512 + lane * 16).unsafe_store[alignment=16](0, bitcast[DType.uint8, 16](sums[m]))
    barrier()
    var sum = SIMD[DType.float32, 4](0)
    comptime for other in range(WARPS):
        sum += bitcast[DType.float32, 4](
            shared.unsafe_offset(other * WARP_BYTES + warp * 512 + lane * 16).unsafe_load[width=16, alignment=16]()
        )
    var out_row = first_row + warp * 16 + 2 * group
    var bias_even = bias[unsafe_offset=expert_row + out_row].cast[DType.float32]()
    var bias_odd = bias[unsafe_offset=expert_row + out_row + 1].cast[DType.float32]()
    comptime for column in range(2):
        var out_token = 2 * quad + column
        if out_token < tile.count:
            store[swiglu_](output, tile.begin + out_token, out_row, rows, sum[column] + bias_even, sum[2 + column] + bias_odd)
    return True
