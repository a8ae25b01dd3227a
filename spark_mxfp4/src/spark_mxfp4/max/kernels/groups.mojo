"""Tiles of the groups of activation rows, one group per expert, that MAX's `moe_create_indices` returns."""

from max.gpu import lane_id
from max.gpu.primitives.warp import shuffle_idx, shuffle_up
from std.sys import inlined_assembly


@fieldwise_init
struct Tile(TrivialRegisterPassable):
    """`count` rows of one expert's activations, from row `begin` on; `count` is 0 if there is no such tile."""

    var expert: Int
    var begin: Int
    var count: Int


def tile_limit(rows: Int, groups: Int, tile_rows: Int) -> Int:
    """Returns an upper bound of the number of tiles of `rows` rows in `groups` groups."""
    return min(rows, groups) + rows // tile_rows


@always_inline
def find_tile[
    tile_rows: Int, even: Bool = False
](
    index: Int,
    starts: Pointer[UInt32, ImmutAnyOrigin],
    ids: Pointer[Int32, ImmutAnyOrigin],
    groups: Int,
) -> Tile:
    """Returns tile number `index` in all lanes of a warp; all lanes must call it with the same `index`.

    Group i has the rows from `starts[i]` up to `starts[i + 1]` of expert `ids[i]`. Empty groups have no tile. With
    `even`, a group's rows are spread evenly over its tiles; otherwise all tiles but the last have `tile_rows` rows.
    """
    comptime ROWS = Int32(tile_rows)
    comptime LAST = Int32(tile_rows - 1)
    comptime EACH = 4  # groups per lane, so that a warp reads 128 groups at once
    var lane = Int32(lane_id())
    var limit = Int32(groups)
    var wanted = Int32(index)  # the index, minus the number of tiles of earlier groups
    for first in range(0, groups, 32 * EACH):
        var mine = Int32(first) + lane * Int32(EACH)
        var begins = Array[Int32, EACH + 1](fill=0)
        var experts = Array[Int32, EACH](fill=0)
        comptime for i in range(EACH + 1):
            begins[i] = Int32(starts[unsafe_offset=Int(min(mine + Int32(i), limit))])
        comptime for i in range(EACH):
            experts[i] = ids[unsafe_offset=Int(min(mine + Int32(i), limit - 1))]
        var tiles = Int32(0)
        comptime for i in range(EACH):
            tiles += (begins[i + 1] - begins[i] + LAST) // ROWS
        var through = tiles  # inclusive prefix sum over the lanes
        comptime for step in range(5):
            var other = shuffle_up(through, UInt32(1 << step))
            if lane >= Int32(1 << step):
                through += other
        var total = shuffle_idx(through, UInt32(31))
        if wanted < total:
            # The owner is the first lane whose prefix sum is above `wanted`: count the lanes before it.
            var is_below = UInt32(1) if through <= wanted else UInt32(0)
            var mask = inlined_assembly[
                "{.reg .pred p;\nsetp.ne.u32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, 0xffffffff;}",
                UInt32,
                constraints="=r,r",
                has_side_effect=True,
            ](is_below)
            var owner = UInt32(inlined_assembly["popc.b32 $0, $1;", UInt32, constraints="=r,r"](mask))
            # Each lane searches its own groups as if it were the owner; only the owner's result is used.
            var place = wanted - (through - tiles)
            var expert = Int32(-1)
            var begin = Int32(0)
            var count = Int32(0)
            comptime for i in range(EACH):
                var rows = begins[i + 1] - begins[i]
                var parts = (rows + LAST) // ROWS
                if place >= 0 and place < parts:
                    var part = ROWS
                    comptime if even:
                        part = (rows + parts - 1) // parts
                    expert = experts[i]
                    begin = begins[i] + place * part
                    count = min(rows - place * part, part)
                place -= parts
            expert = shuffle_idx(expert, owner)
            begin = shuffle_idx(begin, owner)
            count = shuffle_idx(count, owner)
            if expert < 0:
                return Tile(0, 0, 0)
            return Tile(Int(expert), Int(begin), Int(count))
        wanted -= total
    return Tile(0, 0, 0)
