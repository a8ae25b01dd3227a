"""The graph operations: the grouped product, rounding with a bias, and a whole mixture of experts for CPUs."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from .cpu import mix, multiply_row
from .decode import launch_decode
from .format import BLOCK
from .prefill import launch_prefill
from .rounding import WIDTH, launch_add_and_round, round_to_bfloat16
from .wgmma import HAS_WGMMA

# The prefill kernel is used if groups have at least this many rows on average. On an H100 it is the faster kernel from
# 16 rows on, and the slower one at 8 (bench/results/max-kernels-h100.json).
comptime PREFILL_ROWS = 16 if HAS_WGMMA else 32


@extensibility.register("spark_mxfp4.grouped_matmul")
struct GroupedMatmul[swiglu: Bool]:
    """Multiplies groups of rows with their experts' packed weights and adds the bias.

    `x` is [P, K] in paired order (see `format`), `blocks` u8 [E, N, K/2], `scales` u8 [E, N, K/32], `bias` [E, N].
    Group i has the rows from `starts[i]` up to `starts[i + 1]` (u32 [G + 1]) of expert `ids[i]` (i32 [G]). A group may
    be empty.
    `output` is [P, N]. With `swiglu` it is [P, N/2] in paired order: gpt-oss' activation of the weight rows 2i (gate)
    and 2i + 1 (up).
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        blocks: InputTensor[dtype=DType.uint8, rank=3, ...],
        scales: InputTensor[dtype=DType.uint8, rank=3, ...],
        bias: InputTensor[dtype=dtype, rank=2, ...],
        starts: InputTensor[dtype=DType.uint32, rank=1, ...],
        ids: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var tokens = Int(x.dim_size(0))
        var columns = Int(x.dim_size(1))
        var rows = Int(blocks.dim_size(1))
        var groups = Int(ids.dim_size(0))
        if columns % BLOCK != 0 or rows % 16 != 0:
            raise Error("MXFP4 experts need columns in blocks of 32 and rows in multiples of 16")
        if tokens == 0:
            return
        comptime if is_cpu[target]():
            var width = Int(output.dim_size(1))
            for group in range(groups):
                var begin = Int(starts.unsafe_ptr()[unsafe_offset=group])
                var end = Int(starts.unsafe_ptr()[unsafe_offset=group + 1])
                for token in range(begin, end):
                    multiply_row[dtype, Self.swiglu, True](
                        rebind[Pointer[Scalar[dtype], MutAnyOrigin]](output.unsafe_ptr()).unsafe_offset(token * width),
                        rebind[Pointer[Scalar[dtype], ImmutAnyOrigin]](x.unsafe_ptr()).unsafe_offset(token * columns),
                        rebind[Pointer[UInt8, ImmutAnyOrigin]](blocks.unsafe_ptr()),
                        rebind[Pointer[UInt8, ImmutAnyOrigin]](scales.unsafe_ptr()),
                        rebind[Pointer[Scalar[dtype], ImmutAnyOrigin]](bias.unsafe_ptr()),
                        Int(ids.unsafe_ptr()[unsafe_offset=group]), rows, columns,
                    )
        else:
            comptime assert dtype == DType.bfloat16, "on a GPU activations and biases are bfloat16"
            var to = rebind[Pointer[BFloat16, MutAnyOrigin]](output.unsafe_ptr())
            var x_bytes = rebind[Pointer[BFloat16, ImmutAnyOrigin]](x.unsafe_ptr()).unsafe_bitcast[UInt8]()
            var weight = rebind[Pointer[UInt8, ImmutAnyOrigin]](blocks.unsafe_ptr())
            var scale_bytes = rebind[Pointer[UInt8, ImmutAnyOrigin]](scales.unsafe_ptr())
            var biases = rebind[Pointer[BFloat16, ImmutAnyOrigin]](bias.unsafe_ptr())
            var begins = rebind[Pointer[UInt32, ImmutAnyOrigin]](starts.unsafe_ptr())
            var experts = rebind[Pointer[Int32, ImmutAnyOrigin]](ids.unsafe_ptr())
            if tokens >= PREFILL_ROWS * groups:
                launch_prefill[Self.swiglu, DType.bfloat16](
                    to, x_bytes, weight, scale_bytes, biases, begins, experts, tokens, groups, rows, columns, ctx
                )
            else:
                launch_decode[Self.swiglu, DType.bfloat16](
                    to, x_bytes, weight, scale_bytes, biases, begins, experts, tokens, groups, rows, columns, ctx
                )


@extensibility.register("spark_mxfp4.add_and_round")
struct AddAndRound:
    """Adds `bias` bfloat16 [N] to `sums` float32 [P, N] and rounds once; N is a multiple of 4. `output` is [P, N]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        output: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        sums: InputTensor[dtype=DType.float32, rank=2, ...],
        bias: InputTensor[dtype=DType.bfloat16, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var rows = Int(sums.dim_size(0))
        var columns = Int(sums.dim_size(1))
        if columns % WIDTH != 0:
            raise Error("spark_mxfp4.add_and_round needs columns in multiples of 4")
        if rows == 0:
            return
        var to = rebind[Pointer[BFloat16, MutAnyOrigin]](output.unsafe_ptr())
        var values = rebind[Pointer[Float32, ImmutAnyOrigin]](sums.unsafe_ptr())
        var biases = rebind[Pointer[BFloat16, ImmutAnyOrigin]](bias.unsafe_ptr())
        comptime if is_cpu[target]():
            for row in range(rows):
                for column in range(columns):
                    var value = values[unsafe_offset=row * columns + column]
                    var added = value + biases[unsafe_offset=column].cast[DType.float32]()
                    to[unsafe_offset=row * columns + column] = round_to_bfloat16(added)
        else:
            launch_add_and_round(to, values, biases, rows, columns, ctx)


@extensibility.register("spark_mxfp4.moe")
struct MixtureOfExperts:
    """Computes the mixture of experts of gpt-oss on a CPU: both products, the activation and the weighted sum.

    `x` is [T, H], not in paired order. `experts` i32 [T, k] and `routing` [T, k] are the router's choice and shares.
    Weights are as in `GroupedMatmul`. `output` is [T, H].
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        experts: InputTensor[dtype=DType.int32, rank=2, ...],
        routing: InputTensor[dtype=dtype, rank=2, ...],
        gate_up: InputTensor[dtype=DType.uint8, rank=3, ...],
        gate_up_scales: InputTensor[dtype=DType.uint8, rank=3, ...],
        gate_up_bias: InputTensor[dtype=dtype, rank=2, ...],
        down: InputTensor[dtype=DType.uint8, rank=3, ...],
        down_scales: InputTensor[dtype=DType.uint8, rank=3, ...],
        down_bias: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if not is_cpu[target]():
            raise Error("spark_mxfp4.moe is for CPUs; on a GPU the grouped product follows MAX's routing")
        else:
            var hidden = Int(x.dim_size(1))
            var inner = Int(gate_up.dim_size(1)) // 2
            var chosen = Int(experts.dim_size(1))
            var tokens = Int(x.dim_size(0))
            if hidden % BLOCK != 0 or inner % BLOCK != 0:
                raise Error("MXFP4 experts need columns in blocks of 32")

            for token in range(tokens):
                mix[dtype](
                    rebind[Pointer[Scalar[dtype], MutAnyOrigin]](output.unsafe_ptr()).unsafe_offset(token * hidden),
                    rebind[Pointer[Scalar[dtype], ImmutAnyOrigin]](x.unsafe_ptr()).unsafe_offset(token * hidden),
                    rebind[Pointer[Int32, ImmutAnyOrigin]](experts.unsafe_ptr()).unsafe_offset(token * chosen),
                    rebind[Pointer[Scalar[dtype], ImmutAnyOrigin]](routing.unsafe_ptr()).unsafe_offset(token * chosen),
                    chosen,
                    rebind[Pointer[UInt8, ImmutAnyOrigin]](gate_up.unsafe_ptr()),
                    rebind[Pointer[UInt8, ImmutAnyOrigin]](gate_up_scales.unsafe_ptr()),
                    rebind[Pointer[Scalar[dtype], ImmutAnyOrigin]](gate_up_bias.unsafe_ptr()),
                    rebind[Pointer[UInt8, ImmutAnyOrigin]](down.unsafe_ptr()),
                    rebind[Pointer[UInt8, ImmutAnyOrigin]](down_scales.unsafe_ptr()),
                    rebind[Pointer[Scalar[dtype], ImmutAnyOrigin]](down_bias.unsafe_ptr()),
                    hidden, inner,
                )
