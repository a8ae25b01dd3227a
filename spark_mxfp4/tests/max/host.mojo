"""The kernels' parts that run on a CPU, as a C library for the tests: `mojo build --emit shared-lib`."""

from std.memory import bitcast

from kernels.cpu import dequantize, mix, multiply_row
from kernels.format import expand_pairs, scale_factors
from kernels.rounding import round_to_bfloat16

comptime Bytes = Pointer[UInt8, ImmutAnyOrigin]
comptime Floats = Pointer[Float32, ImmutAnyOrigin]


@export("spark_dequantize_float32")
def dequantize_float32(output: Int, blocks: Int, scales: Int, count: Int) abi("C"):
    """Expands `count` blocks to float32."""
    dequantize[DType.float32](
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=output),
        Bytes(unsafe_from_address=blocks), Bytes(unsafe_from_address=scales), count,
    )


@export("spark_dequantize_bfloat16")
def dequantize_bfloat16(output: Int, blocks: Int, scales: Int, count: Int) abi("C"):
    """Expands `count` blocks to bfloat16."""
    dequantize[DType.bfloat16](
        Pointer[BFloat16, MutAnyOrigin](unsafe_from_address=output),
        Bytes(unsafe_from_address=blocks), Bytes(unsafe_from_address=scales), count,
    )


@export("spark_expand_pairs")
def expand_pairs_and_factors(output: Int, word: UInt32, scale: UInt32) abi("C"):
    """Writes the four pairs of a word and the two factors of a scale, as the GPU kernels have them: u32 [6]."""
    var to = Pointer[UInt32, MutAnyOrigin](unsafe_from_address=output)
    var pairs = expand_pairs(word)
    for i in range(4):
        to[unsafe_offset=i] = pairs[i]
    var factors = scale_factors(scale)
    to[unsafe_offset=4] = factors[0]
    to[unsafe_offset=5] = factors[1]


@export("spark_round")
def round(output: Int, values: Int, count: Int) abi("C"):
    """Rounds `count` float32 values to bfloat16."""
    var to = Pointer[BFloat16, MutAnyOrigin](unsafe_from_address=output)
    var at = Floats(unsafe_from_address=values)
    for i in range(count):
        to[unsafe_offset=i] = round_to_bfloat16(at[unsafe_offset=i])


@export("spark_product")
def product(
    output: Int, x: Int, weight: Int, scales: Int, bias: Int, expert: Int, rows: Int, columns: Int, activated: Int
) abi("C"):
    """Multiplies one row of activations in paired order, as `spark_mxfp4.grouped_matmul` does on a CPU."""
    var to = Pointer[Float32, MutAnyOrigin](unsafe_from_address=output)
    var row = Floats(unsafe_from_address=x)
    var blocks = Bytes(unsafe_from_address=weight)
    var scale_bytes = Bytes(unsafe_from_address=scales)
    var biases = Floats(unsafe_from_address=bias)
    if activated != 0:
        multiply_row[DType.float32, True, True](to, row, blocks, scale_bytes, biases, expert, rows, columns)
    else:
        multiply_row[DType.float32, False, True](to, row, blocks, scale_bytes, biases, expert, rows, columns)


@export("spark_moe")
def moe(
    output: Int, x: Int, chosen: Int, routing: Int, tokens: Int, count: Int, gate_up: Int, gate_up_scales: Int,
    gate_up_bias: Int, down: Int, down_scales: Int, down_bias: Int, hidden: Int, inner: Int,
) abi("C"):
    """The whole mixture of experts, as `spark_mxfp4.moe` does it."""
    for token in range(tokens):
        mix[DType.float32](
            Pointer[Float32, MutAnyOrigin](unsafe_from_address=output).unsafe_offset(token * hidden),
            Floats(unsafe_from_address=x).unsafe_offset(token * hidden),
            Pointer[Int32, ImmutAnyOrigin](unsafe_from_address=chosen).unsafe_offset(token * count),
            Floats(unsafe_from_address=routing).unsafe_offset(token * count), count,
            Bytes(unsafe_from_address=gate_up), Bytes(unsafe_from_address=gate_up_scales),
            Floats(unsafe_from_address=gate_up_bias), Bytes(unsafe_from_address=down),
            Bytes(unsafe_from_address=down_scales), Floats(unsafe_from_address=down_bias), hidden, inner,
        )
