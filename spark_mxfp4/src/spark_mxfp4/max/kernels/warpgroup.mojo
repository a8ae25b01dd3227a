"""Hopper's warpgroup matrix instruction, 64 x N x 64: the left operand in registers, the right in shared memory.

Source: PTX ISA, "wgmma.mma_async". The left operand and the accumulators have the fragment layout of `mma` 16 x 8 x 16;
warp i has rows 16i to 16i + 15. The assembly text names every register, so each N has its own branch.
"""

from std.memory import bitcast
from std.sys import inlined_assembly
from std.sys.intrinsics import _RegisterPackType

comptime F = Float32


def operands(first: Int, count: Int) -> String:
    """Returns a list of `count` operands in braces: `{$first, ...}`."""
    var text = String("{")
    for i in range(count):
        text += (", $" if i > 0 else "$") + String(first + i)
    return text + "}"


def instruction_text(n: Int) -> String:
    """Returns the text of four instructions of 16 columns each, committed as one group.

    Its operands are n // 2 accumulators, 16 words of the left operand, and the descriptor of the right one.
    """
    var text = String("{.reg .pred p;\n.reg .b64 at;\nsetp.eq.b32 p, 0, 0;\nwgmma.fence.sync.aligned;\n")
    for step in range(4):
        # 16 columns are 32 bytes: 2 in the descriptor, which counts units of 16 bytes.
        text += "add.s64 at, $" + String(n // 2 + 16) + ", " + String(2 * step) + ";\n"
        text += "wgmma.mma_async.sync.aligned.m64n" + String(n) + "k16.f32.bf16.bf16 " + operands(0, n // 2) + ", "
        text += operands(n // 2 + 4 * step, 4) + ", at, p, 1, 1, 0;\n"
    return text + "wgmma.commit_group.sync.aligned;}"


def constraints_text(n: Int) -> String:
    """Returns the constraints of `instruction_text`: each accumulator is read and written in the same register."""
    var text = String("=f,") * (n // 2) + String("r,") * 16 + "l"
    for i in range(n // 2):
        text += "," + String(i)
    return text + ",~{memory}"


@always_inline
def multiply_64[n: Int](mut s: Array[Float32, n // 2], a: Array[UInt32, 16], b: Int64):
    """Adds `a` (64 rows x 64 columns) times the `n` tokens of descriptor `b` to `s`, asynchronously, as one group."""
    comptime TEXT = instruction_text(n)
    comptime CONSTRAINTS = constraints_text(n)
    comptime assert n == 32 or n == 64 or n == 96 or n == 128 or n == 144, "no text for this N"
    comptime if n == 32:
        var r = inlined_assembly[
            TEXT,
            _RegisterPackType[
                F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F,
            ],
            constraints=CONSTRAINTS,
            has_side_effect=True,
        ](
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
            b,
            s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11],
            s[12], s[13], s[14], s[15],
        )
        comptime for i in range(n // 2):
            s[i] = r[i]
    comptime if n == 64:
        var r = inlined_assembly[
            TEXT,
            _RegisterPackType[
                F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F,
            ],
            constraints=CONSTRAINTS,
            has_side_effect=True,
        ](
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
            b,
            s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11],
            s[12], s[13], s[14], s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23],
            s[24], s[25], s[26], s[27], s[28], s[29], s[30], s[31],
        )
        comptime for i in range(n // 2):
            s[i] = r[i]
    comptime if n == 96:
        var r = inlined_assembly[
            TEXT,
            _RegisterPackType[
                F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F,
                F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F,
            ],
            constraints=CONSTRAINTS,
            has_side_effect=True,
        ](
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
            b,
            s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11],
            s[12], s[13], s[14], s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23],
            s[24], s[25], s[26], s[27], s[28], s[29], s[30], s[31], s[32], s[33], s[34], s[35],
            s[36], s[37], s[38], s[39], s[40], s[41], s[42], s[43], s[44], s[45], s[46], s[47],
        )
        comptime for i in range(n // 2):
            s[i] = r[i]
    comptime if n == 128:
        var r = inlined_assembly[
            TEXT,
            _RegisterPackType[
                F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F,
                F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F,
            ],
            constraints=CONSTRAINTS,
            has_side_effect=True,
        ](
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
            b,
            s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11],
            s[12], s[13], s[14], s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23],
            s[24], s[25], s[26], s[27], s[28], s[29], s[30], s[31], s[32], s[33], s[34], s[35],
            s[36], s[37], s[38], s[39], s[40], s[41], s[42], s[43], s[44], s[45], s[46], s[47],
            s[48], s[49], s[50], s[51], s[52], s[53], s[54], s[55], s[56], s[57], s[58], s[59],
            s[60], s[61], s[62], s[63],
        )
        comptime for i in range(n // 2):
            s[i] = r[i]
    comptime if n == 144:
        var r = inlined_assembly[
            TEXT,
            _RegisterPackType[
                F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F,
                F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F,
                F, F, F, F, F, F, F, F,
            ],
            constraints=CONSTRAINTS,
            has_side_effect=True,
        ](
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
            b,
            s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11],
            s[12], s[13], s[14], s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23],
            s[24], s[25], s[26], s[27], s[28], s[29], s[30], s[31], s[32], s[33], s[34], s[35],
            s[36], s[37], s[38], s[39], s[40], s[41], s[42], s[43], s[44], s[45], s[46], s[47],
            s[48], s[49], s[50], s[51], s[52], s[53], s[54], s[55], s[56], s[57], s[58], s[59],
            s[60], s[61], s[62], s[63], s[64], s[65], s[66], s[67], s[68], s[69], s[70], s[71],
        )
        comptime for i in range(n // 2):
            s[i] = r[i]


@always_inline
def wait_for_products[pending: Int]():
    """Waits until at most `pending` groups of this warpgroup are in flight."""
    inlined_assembly[
        "wgmma.wait_group.sync.aligned $0;", NoneType, constraints="n,~{memory}", has_side_effect=True
    ](pending)


@always_inline
def make_visible():
    """Makes this thread's copies to shared memory visible to the matrix instructions, which use the async proxy."""
    inlined_assembly["fence.proxy.async.shared::cta;", NoneType, constraints="~{memory}", has_side_effect=True]()


@always_inline
def pin(value: UInt32) -> UInt32:
    """Returns `value` and forces the compiler to compute it before the next assembly, as `wgmma.fence` requires."""
    return inlined_assembly["", UInt32, constraints="=r,0,~{memory}", has_side_effect=True](value)


@always_inline
def pin(value: Float32) -> Float32:
    """Returns `value` and forces later reads of it to follow the preceding assembly, such as a wait for products."""
    return inlined_assembly["", Float32, constraints="=f,0,~{memory}", has_side_effect=True](value)


@always_inline
def descriptor(address: UInt32) -> Int64:
    """Returns the descriptor of the right operand at `address` in shared memory, a multiple of 1,024.

    Each token has 64 bfloat16, which are eight units of 16 bytes. Unit u of token t is stored as unit u ^ (t % 8) (the
    128-byte swizzle). Eight tokens are 1,024 bytes.
    """
    return (Int64(1) << 62) | (Int64(1024 >> 4) << 32) | (Int64(1) << 16) | Int64((address & 0x3FFFF) >> 4)
