"""Checks the kernels on a GPU against float32 and times them: `mojo build`, then run it on a machine with a GPU.

It prints a JSON object a line for each case and ends with 1 if a result is wrong. `--skip KERNEL` leaves one out,
`--only KERNEL` all others; `--tiny` checks small shapes and times nothing; `--no-times`, `--no-checks`. Outputs are filled with NaN before each product. Inputs
are random, weights of gpt-oss-120b's shape; the reference expands each weight by `expand`, which shares nothing with
the kernels' own expansion. Times are of many launches with another routing each, so that the L2 cache does not hold
the experts; bytes are those of the experts that have tokens, packed.
"""

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.math import isfinite, isnan, sqrt
from std.memory import bitcast
from std.sys import argv
from std.time import perf_counter_ns

from kernels.cpu import paired
from kernels.decode import launch_decode
from kernels.format import expand
from kernels.prefill import launch_mma
from kernels.product import swiglu
from kernels.rounding import launch_add_and_round, round_to_bfloat16
from kernels.wgmma import HAS_WGMMA, launch_wgmma

comptime HIDDEN = 2880
comptime INNER = 2880
comptime EXPERTS = 128
comptime CHOSEN = 4
comptime ROUTINGS = 16
comptime Bf16 = DType.bfloat16
comptime DECODE = 0
comptime DECODE_BY_ROWS = 1  # without the path for up to 8 tokens in which each warp copies for itself
comptime MMA = 2
comptime WGMMA = 3
comptime KERNELS = 4


def kernel_name(kernel: Int) -> String:
    """Returns what a kernel is called on the command line and in the output."""
    if kernel == DECODE:
        return "decode"
    if kernel == DECODE_BY_ROWS:
        return "decode-by-rows"
    return "mma" if kernel == MMA else "wgmma"


@always_inline
def mixed(value: UInt32) -> UInt32:
    """Returns pseudo-random bits of a counter (the finaliser of MurmurHash3)."""
    var x = value
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


def fill_bytes(to: Pointer[UInt8, MutAnyOrigin], count: Int64, seed: UInt32, low: UInt32, span: UInt32):
    """Writes bytes of `low` … `low + span - 1`."""
    var i = Int64(block_idx.x) * Int64(block_dim.x) + Int64(thread_idx.x)
    if i < count:
        to[unsafe_offset=Int(i)] = UInt8(low + mixed(UInt32(i) ^ seed) % span)


def fill_bf16(to: Pointer[BFloat16, MutAnyOrigin], count: Int64, seed: UInt32):
    """Writes values between -1 and 1."""
    var i = Int64(block_idx.x) * Int64(block_dim.x) + Int64(thread_idx.x)
    if i < count:
        var value = Float32(Int32(mixed(UInt32(i) ^ seed) >> 8)) * Float32(1.1920929e-07) - 1
        to[unsafe_offset=Int(i)] = value.cast[Bf16]()


def poison(to: Pointer[BFloat16, MutAnyOrigin], count: Int64):
    """Writes NaN."""
    var i = Int64(block_idx.x) * Int64(block_dim.x) + Int64(thread_idx.x)
    if i < count:
        to[unsafe_offset=Int(i)] = bitcast[Bf16, 1](UInt16(0xFFFF))


def reference(
    to: Pointer[Float32, MutAnyOrigin],
    x: Pointer[BFloat16, ImmutAnyOrigin],
    weight: Pointer[UInt8, ImmutAnyOrigin],
    scales: Pointer[UInt8, ImmutAnyOrigin],
    bias: Pointer[BFloat16, ImmutAnyOrigin],
    expert_of: Pointer[Int32, ImmutAnyOrigin],
    rows: Int32,
    columns: Int32,
):
    """Writes `to` [tokens, rows] in float32, a thread a value; `expert_of` has each token's expert."""
    var row = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    var token = Int(block_idx.y)
    var n = Int(rows)
    var k = Int(columns)
    if row >= n:
        return
    var at = Int(expert_of[unsafe_offset=token]) * n + row
    var sum = Float32(0)
    for block in range(k // 32):
        var scale = scales[unsafe_offset=at * (k // 32) + block]
        for column in range(block * 32, block * 32 + 32):
            var byte = weight[unsafe_offset=at * (k // 2) + column // 2]
            var code = byte >> 4 if column % 2 == 1 else byte & 15
            sum += expand[1](SIMD[DType.uint8, 1](code), scale)[0] * x[
                unsafe_offset=token * k + paired(column)
            ].cast[DType.float32]()
    to[unsafe_offset=token * n + row] = sum + bias[unsafe_offset=at].cast[DType.float32]()


def grid(count: Int) -> Int:
    return (count + 255) // 256


struct Layer(Movable):
    """Random weights of one projection of all experts."""

    var weight: DeviceBuffer[DType.uint8]
    var scales: DeviceBuffer[DType.uint8]
    var bias: DeviceBuffer[Bf16]
    var experts: Int
    var rows: Int
    var columns: Int

    def __init__(out self, ctx: DeviceContext, experts: Int, rows: Int, columns: Int, seed: UInt32) raises:
        var bytes = experts * rows * columns // 2
        self.weight = ctx.enqueue_create_buffer[DType.uint8](bytes)
        self.scales = ctx.enqueue_create_buffer[DType.uint8](bytes // 16)
        self.bias = ctx.enqueue_create_buffer[Bf16](experts * rows)
        self.experts = experts
        self.rows = rows
        self.columns = columns
        ctx.enqueue_function[fill_bytes](
            self.weight, Int64(bytes), seed, UInt32(0), UInt32(256), grid_dim=grid(bytes), block_dim=256
        )
        ctx.enqueue_function[fill_bytes](
            self.scales, Int64(bytes // 16), seed + 1, UInt32(117), UInt32(6), grid_dim=grid(bytes // 16), block_dim=256
        )
        ctx.enqueue_function[fill_bf16](
            self.bias, Int64(experts * rows), seed + 2, grid_dim=grid(experts * rows), block_dim=256
        )


def launch[
    swiglu_: Bool
](
    ctx: DeviceContext,
    kernel: Int,
    layer: Layer,
    output: DeviceBuffer[Bf16],
    x: DeviceBuffer[Bf16],
    starts: DeviceBuffer[DType.uint32],
    ids: DeviceBuffer[DType.int32],
    tokens: Int,
    groups: Int,
) raises:
    """Enqueues one of the kernels."""
    var to = rebind[Pointer[BFloat16, MutAnyOrigin]](output.unsafe_ptr())
    var x_bytes = rebind[Pointer[BFloat16, ImmutAnyOrigin]](x.unsafe_ptr()).unsafe_bitcast[UInt8]()
    var weight = rebind[Pointer[UInt8, ImmutAnyOrigin]](layer.weight.unsafe_ptr())
    var scales = rebind[Pointer[UInt8, ImmutAnyOrigin]](layer.scales.unsafe_ptr())
    var bias = rebind[Pointer[BFloat16, ImmutAnyOrigin]](layer.bias.unsafe_ptr())
    var begins = rebind[Pointer[UInt32, ImmutAnyOrigin]](starts.unsafe_ptr())
    var experts = rebind[Pointer[Int32, ImmutAnyOrigin]](ids.unsafe_ptr())
    var rows = layer.rows
    var columns = layer.columns
    if kernel == DECODE:
        launch_decode[swiglu_, Bf16](
            to, x_bytes, weight, scales, bias, begins, experts, tokens, groups, rows, columns, ctx
        )
    elif kernel == MMA:
        launch_mma[swiglu_, Bf16](to, x_bytes, weight, scales, bias, begins, experts, tokens, groups, rows, columns, ctx)
    comptime if HAS_WGMMA:
        if kernel == DECODE_BY_ROWS:
            launch_decode[swiglu_, Bf16, narrow=False](
                to, x_bytes, weight, scales, bias, begins, experts, tokens, groups, rows, columns, ctx
            )
        elif kernel == WGMMA:
            launch_wgmma[swiglu_, Bf16](
                to, x_bytes, weight, scales, bias, begins, experts, tokens, groups, rows, columns, ctx
            )


def routed(tokens: Int, experts: Int, seed: Int) -> List[Int]:
    """Returns how many of `tokens` tokens each expert gets, when each token takes CHOSEN different ones at random."""
    var sizes = List[Int](length=experts, fill=0)
    var counter = UInt32(seed * 7919 + 1)
    for _ in range(tokens):
        var taken = List[Int]()
        while len(taken) < min(CHOSEN, experts):
            counter += 1
            var expert = Int(mixed(counter) % UInt32(experts))
            if expert not in taken:
                taken.append(expert)
                sizes[expert] += 1
    return sizes^


def upload(
    ctx: DeviceContext, sizes: List[Int], starts: DeviceBuffer[DType.uint32], ids: DeviceBuffer[DType.int32]
) raises:
    """Writes the groups of `sizes` as MAX's `moe_create_indices` gives them, empty ones included."""
    with starts.map_to_host() as host_starts:
        var begin = 0
        for i in range(len(sizes)):
            host_starts[i] = UInt32(begin)
            begin += sizes[i]
        host_starts[len(sizes)] = UInt32(begin)
    with ids.map_to_host() as host_ids:
        for i in range(len(sizes)):
            host_ids[i] = Int32(i)


def check[
    swiglu_: Bool
](ctx: DeviceContext, name: String, layer: Layer, sizes: List[Int], kernels: List[Int]) raises -> Bool:
    """Compares kernels with the reference; prints the largest error and the outputs' own size."""
    var tokens = 0
    for size in sizes:
        tokens += size
    var groups = len(sizes)
    var width = layer.rows // 2 if swiglu_ else layer.rows
    var x = ctx.enqueue_create_buffer[Bf16](tokens * layer.columns)
    var output = ctx.enqueue_create_buffer[Bf16](tokens * width)
    var expected = ctx.enqueue_create_buffer[DType.float32](tokens * layer.rows)
    var starts = ctx.enqueue_create_buffer[DType.uint32](groups + 1)
    var ids = ctx.enqueue_create_buffer[DType.int32](groups)
    var expert_of = ctx.enqueue_create_buffer[DType.int32](tokens)
    upload(ctx, sizes, starts, ids)
    with expert_of.map_to_host() as host:
        var token = 0
        for expert in range(groups):
            for _ in range(sizes[expert]):
                host[token] = Int32(expert)
                token += 1
    ctx.enqueue_function[fill_bf16](
        x, Int64(tokens * layer.columns), UInt32(tokens), grid_dim=grid(tokens * layer.columns), block_dim=256
    )
    ctx.enqueue_function[reference](
        expected, x, layer.weight, layer.scales, layer.bias, expert_of, Int32(layer.rows), Int32(layer.columns),
        grid_dim=(grid(layer.rows), tokens), block_dim=256,
    )
    var wants = List[Float32](length=tokens * width, fill=0)
    var squares = Float64(0)
    with expected.map_to_host() as wanted:
        for token in range(tokens):
            for column in range(width):
                var want: Float32
                comptime if swiglu_:
                    var at = token * layer.rows + 2 * column
                    want = swiglu(wanted[at], wanted[at + 1])
                else:
                    want = wanted[token * width + column]
                wants[token * width + column] = want
                squares += Float64(want) * Float64(want)
    var size = sqrt(squares / Float64(tokens * width))
    var passed = True
    for kernel in kernels:
        ctx.enqueue_function[poison](output, Int64(tokens * width), grid_dim=grid(tokens * width), block_dim=256)
        launch[swiglu_](ctx, kernel, layer, output, x, starts, ids, tokens, groups)
        ctx.synchronize()
        var worst = Float32(0)
        var bad = 0
        with output.map_to_host() as values:
            for token in range(tokens):
                for column in range(width):
                    var want = wants[token * width + column]
                    var got: Float32
                    comptime if swiglu_:
                        got = values[token * width + paired(column)].cast[DType.float32]()
                    else:
                        got = values[token * width + column].cast[DType.float32]()
                    if not isfinite(got):
                        bad += 1
                    else:
                        # bfloat16 has 8 bits; the sum's order may move the value before it is rounded.
                        var error = abs(got - want)
                        if error > abs(want) * Float32(0.0079) + Float32(0.002):
                            bad += 1
                        worst = max(worst, error)
        print(
            '{"check": "', name, '", "product": "', "gate_up" if swiglu_ else "down", '", "kernel": "',
            kernel_name(kernel), '", "rows": ', tokens, ', "n": ', layer.rows, ', "k": ', layer.columns, ', "worst": ',
            worst, ', "rms": ', size, ', "wrong": ', bad, "}", sep="", flush=True,
        )
        passed = passed and bad == 0
    return passed


def check_format(ctx: DeviceContext, kernels: List[Int]) raises -> Bool:
    """Multiplies all bytes at all scales whose values are finite with the identity: each must come back exactly."""
    comptime ROWS = 16 * 256
    var layer = Layer(ctx, 1, ROWS, 32, UInt32(1))
    with layer.weight.map_to_host() as weight, layer.scales.map_to_host() as scales, layer.bias.map_to_host() as bias:
        for row in range(ROWS):
            scales[row] = UInt8(row // 16)
            bias[row] = BFloat16(0)
            for i in range(16):
                weight[row * 16 + i] = UInt8(row % 16 * 16 + i)
    var x = ctx.enqueue_create_buffer[Bf16](32 * 32)
    with x.map_to_host() as host:
        for token in range(32):
            for column in range(32):
                host[token * 32 + paired(column)] = BFloat16(1) if token == column else BFloat16(0)
    var output = ctx.enqueue_create_buffer[Bf16](32 * ROWS)
    var starts = ctx.enqueue_create_buffer[DType.uint32](2)
    var ids = ctx.enqueue_create_buffer[DType.int32](1)
    var sizes = List[Int](length=1, fill=32)
    upload(ctx, sizes, starts, ids)
    var passed = True
    for kernel in kernels:
        ctx.enqueue_function[poison](output, Int64(32 * ROWS), grid_dim=grid(32 * ROWS), block_dim=256)
        launch[False](ctx, kernel, layer, output, x, starts, ids, 32, 1)
        ctx.synchronize()
        var wrong = 0
        var subnormal_wrong = 0
        var compared = 0
        with output.map_to_host() as values:
            for row in range(ROWS):
                var scale = UInt8(row // 16)
                if scale > 252:
                    continue  # an infinite weight times zero is NaN
                for column in range(32):
                    var byte = UInt8(row % 16 * 16 + column // 2)
                    var code = byte >> 4 if column % 2 == 1 else byte & 15
                    var want = expand[1](SIMD[DType.uint8, 1](code), scale)[0]
                    var got = values[column * ROWS + row].cast[DType.float32]()
                    compared += 1
                    if got != want:
                        if scale < 3:
                            subnormal_wrong += 1
                        else:
                            wrong += 1
        print(
            '{"check": "format", "kernel": "', kernel_name(kernel), '", "compared": ', compared, ', "wrong": ', wrong,
            ', "wrong_at_scales_0_to_2": ', subnormal_wrong, "}", sep="", flush=True,
        )
        passed = passed and wrong == 0 and subnormal_wrong == 0
    return passed


def check_rounding(ctx: DeviceContext, rows: Int, columns: Int) raises -> Bool:
    """Compares sums plus bias, rounded, with the same by integers, and the rows behind the result with what was there."""
    comptime BEHIND = 128
    var count = rows * columns
    var all = (rows + BEHIND) * columns
    var sums = ctx.enqueue_create_buffer[DType.float32](count)
    var bias = ctx.enqueue_create_buffer[Bf16](columns)
    var output = ctx.enqueue_create_buffer[Bf16](all)
    ctx.enqueue_function[fill_bf16](bias, Int64(columns), UInt32(rows), grid_dim=grid(columns), block_dim=256)
    with sums.map_to_host() as host:
        for i in range(count):
            host[i] = Float32(Int32(mixed(UInt32(i)))) * Float32(1.1920929e-07)
    ctx.enqueue_function[poison](output, Int64(all), grid_dim=grid(all), block_dim=256)
    launch_add_and_round(
        rebind[Pointer[BFloat16, MutAnyOrigin]](output.unsafe_ptr()),
        rebind[Pointer[Float32, ImmutAnyOrigin]](sums.unsafe_ptr()),
        rebind[Pointer[BFloat16, ImmutAnyOrigin]](bias.unsafe_ptr()), rows, columns, ctx,
    )
    ctx.synchronize()
    var wrong = 0
    with output.map_to_host() as values, sums.map_to_host() as before, bias.map_to_host() as added:
        for i in range(all):
            var bits = bitcast[DType.uint16, 1](values[i])
            if i < count:
                var want = round_to_bfloat16(before[i] + added[i % columns].cast[DType.float32]())
                wrong += 1 if bits != bitcast[DType.uint16, 1](want) else 0
            else:
                wrong += 1 if bits != 0xFFFF else 0
    print(
        '{"check": "rounding", "rows": ', rows, ', "columns": ', columns, ', "wrong": ', wrong, "}", sep="", flush=True
    )
    return wrong == 0


def measure[
    swiglu_: Bool
](
    ctx: DeviceContext, layer: Layer, tokens: Int, copied: Float64, repeats: Int, kernels: List[Int]
) raises:
    """Times kernels for `tokens` tokens of CHOSEN experts each."""
    var pairs = tokens * CHOSEN
    var width = layer.rows // 2 if swiglu_ else layer.rows
    var x = ctx.enqueue_create_buffer[Bf16](pairs * layer.columns)
    var output = ctx.enqueue_create_buffer[Bf16](pairs * width)
    ctx.enqueue_function[fill_bf16](
        x, Int64(pairs * layer.columns), UInt32(tokens), grid_dim=grid(pairs * layer.columns), block_dim=256
    )
    var ids = ctx.enqueue_create_buffer[DType.int32](EXPERTS)
    var all_starts = List[DeviceBuffer[DType.uint32]]()
    var active = 0
    for routing in range(ROUTINGS):
        var sizes = routed(tokens, EXPERTS, routing)
        for size in sizes:
            active += 1 if size > 0 else 0
        var starts = ctx.enqueue_create_buffer[DType.uint32](EXPERTS + 1)
        upload(ctx, sizes, starts, ids)
        all_starts.append(starts)
    var bytes = Float64(active) / Float64(ROUTINGS) * Float64(layer.rows * layer.columns) * (0.5 + 1.0 / 32)
    for kernel in kernels:
        for _ in range(2):
            for routing in range(ROUTINGS):
                launch[swiglu_](ctx, kernel, layer, output, x, all_starts[routing], ids, pairs, EXPERTS)
        ctx.synchronize()
        var best = Float64(1e30)
        for _ in range(repeats):
            var begin = perf_counter_ns()
            for routing in range(ROUTINGS):
                launch[swiglu_](ctx, kernel, layer, output, x, all_starts[routing], ids, pairs, EXPERTS)
            ctx.synchronize()
            best = min(best, Float64(perf_counter_ns() - begin) / Float64(ROUTINGS))
        var gbs = bytes / best
        print(
            '{"time": "', "gate_up" if swiglu_ else "down", '", "kernel": "', kernel_name(kernel), '", "tokens": ', tokens,
            ', "experts": ', Float64(active) / Float64(ROUTINGS), ', "us": ', best / 1000, ', "weights_gbs": ', gbs,
            ', "of_copy": ', gbs / copied, ', "tflops": ',
            2 * Float64(pairs) * Float64(layer.rows) * Float64(layer.columns) / best / 1000, "}", sep="", flush=True,
        )


def copy_rate(ctx: DeviceContext) raises -> Float64:
    """Returns the GB/s, read and written, at which the device copies 2 GB within its memory."""
    comptime SIZE = 2_000_000_000
    var a = ctx.enqueue_create_buffer[DType.uint8](SIZE)
    var b = ctx.enqueue_create_buffer[DType.uint8](SIZE)
    var best = Float64(1e30)
    for _ in range(10):
        ctx.synchronize()
        var begin = perf_counter_ns()
        ctx.enqueue_copy(b, a)
        ctx.synchronize()
        best = min(best, Float64(perf_counter_ns() - begin))
    return 2 * Float64(SIZE) / best


def without(kernels: List[Int], tokens: Int) -> List[Int]:
    """Returns the kernels that are worth timing for `tokens` tokens."""
    var left = List[Int]()
    for kernel in kernels:
        if tokens >= 128 if kernel >= MMA else tokens <= 1024:
            left.append(kernel)
    return left^


def main() raises:
    var kernels = List[Int]()
    var tiny = False
    var checks = True
    var times = True
    for kernel in range(KERNELS):
        var is_wanted = HAS_WGMMA or kernel == DECODE or kernel == MMA
        for i in range(1, len(argv())):
            if argv()[i] == "--skip" and i + 1 < len(argv()) and argv()[i + 1] == kernel_name(kernel):
                is_wanted = False
            if argv()[i] == "--only" and i + 1 < len(argv()) and argv()[i + 1] != kernel_name(kernel):
                is_wanted = False
        if is_wanted:
            kernels.append(kernel)
    for argument in argv():
        tiny = tiny or argument == "--tiny"
        checks = checks and argument != "--no-checks"
        times = times and argument != "--no-times"
    with DeviceContext() as ctx:
        print('{"device": "', ctx.name(), '"}', sep="", flush=True)
        var passed = True
        if checks:
            passed = check_small(ctx, kernels)
        if not tiny:
            var gate_up = Layer(ctx, EXPERTS, 2 * INNER, HIDDEN, UInt32(1000))
            var down = Layer(ctx, EXPERTS, HIDDEN, INNER, UInt32(2000))
            if checks:
                passed = check_large(ctx, gate_up, down, kernels) and passed
            if times:
                var copied = copy_rate(ctx)
                print('{"copy_gbs": ', copied, "}", sep="", flush=True)
                for tokens in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]:
                    var repeats = 20 if tokens < 1024 else 5
                    measure[True](ctx, gate_up, tokens, copied, repeats, without(kernels, tokens))
                    measure[False](ctx, down, tokens, copied, repeats, without(kernels, tokens))
        print('{"passed": ', "true" if passed else "false", "}", sep="", flush=True)
        if not passed:
            raise Error("a kernel gave wrong results; see the lines with `wrong`")


def check_small(ctx: DeviceContext, kernels: List[Int]) raises -> Bool:
    """Checks the format, the rounding, shapes with odd ends, and groups at the borders of every tile."""
    var passed = check_format(ctx, kernels)
    for rows in [1, 3, 127, 128, 129]:
        for columns in [4, 32, 36, 2880, 5120]:
            passed = check_rounding(ctx, rows, columns) and passed
    for size in [32, 64, 96, 160, 288]:
        for rows in [32, 64, 96, 192, 288]:
            var layer = Layer(ctx, 5, rows, size, UInt32(size * 31 + rows))
            passed = check[True](ctx, "ends", layer, [3, 0, 1, 20, 0], kernels) and passed
            passed = check[False](ctx, "ends", layer, [0, 9, 0, 140, 2], kernels) and passed
    var borders = Layer(ctx, 30, 128, 256, UInt32(77))
    var sizes: List[Int] = [
        0, 1, 2, 7, 8, 9, 0, 15, 16, 17, 31, 32, 33, 0, 0, 63, 64, 65, 95, 96, 97, 127, 128, 129, 144, 145, 200, 289, 433, 0
    ]
    passed = check[True](ctx, "borders", borders, sizes, kernels) and passed
    passed = check[False](ctx, "borders", borders, sizes, kernels) and passed
    # A group more than the lanes of a warp take at once, and more rows in one group than are in all others.
    var many = Layer(ctx, 133, 64, 288, UInt32(78))
    var spread = List[Int](length=133, fill=0)
    for i in range(133):
        spread[i] = i % 5
    spread[130] = 150
    passed = check[True](ctx, "many", many, spread, kernels) and passed
    # One scale byte above 127 in a single row: the tiles that hold it take the path with two factors.
    with many.scales.map_to_host() as scales:
        scales[130 * 64 * 9 + 17 * 9 + 4] = 130
        scales[3 * 64 * 9 + 63 * 9 + 8] = 129
    passed = check[False](ctx, "high", many, spread, kernels) and passed
    return passed


def check_large(ctx: DeviceContext, gate_up: Layer, down: Layer, kernels: List[Int]) raises -> Bool:
    """Checks gpt-oss-120b's sizes."""
    var passed = True
    for tokens in [1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 100, 256, 512, 1024]:
        passed = check[True](ctx, "120b", gate_up, routed(tokens, EXPERTS, tokens), kernels) and passed
        passed = check[False](ctx, "120b", down, routed(tokens, EXPERTS, tokens + 1), kernels) and passed
    return passed
