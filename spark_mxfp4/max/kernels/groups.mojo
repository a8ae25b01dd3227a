"""Which rows of activations belong to which expert: groups as MAX's `moe_create_indices` makes them, cut into tiles."""

from max.gpu import lane_id
from max.gpu.primitives.warp import shuffle_idx, shuffle_up
from std.sys import inlined_assembly


@fieldwise_init
struct Tile(TrivialRegisterPassable):
    """`count` rows of one expert's activations from row `begin` on; `count` is 0 where there is no such tile."""

    var expert: Int
    var begin: Int
    var count: Int


def tile_limit(rows: Int, groups: Int, tile_rows: Int) -> Int:
    """Returns an upper bound of the tiles that `rows` rows in `groups` groups make."""
    return min(rows, groups) + rows // tile_rows


@always_inline
def find_tile[
    tile_rows: Int
](
    index: Int,
    starts: Pointer[UInt32, ImmutAnyOrigin],
    ids: Pointer[Int32, ImmutAnyOrigin],
    groups: Int,
) -> Tile:
    """Returns the tile number `index`, the same in all lanes of a warp; a warp has to ask as a whole.

    Group i has the rows `starts[i]` … `starts[i + 1]` of expert `ids[i]`; empty groups have no tile.
    """
    var lane = Int(lane_id())
    var before = 0  # tiles of the groups before these 32
    for first in range(0, groups, 32):
        var group = first + lane
        var begin = 0
        var rows = 0
        if group < groups:
            begin = Int(starts[unsafe_offset=group])
            rows = Int(starts[unsafe_offset=group + 1]) - begin
        var tiles = Int32((rows + tile_rows - 1) // tile_rows)
        var through = tiles  # inclusive sum over the lanes
        comptime for step in range(5):
            var other = shuffle_up(through, UInt32(1 << step))
            if lane >= (1 << step):
                through += other
        var total = Int(shuffle_idx(through, UInt32(31)))
        if index < before + total:
            # The owner is the first lane whose inclusive sum is above the index: count the lanes below it.
            var is_below = UInt32(1) if before + Int(through) <= index else UInt32(0)
            var mask = inlined_assembly[
                "{.reg .pred p;\nsetp.ne.u32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, 0xffffffff;}",
                UInt32,
                constraints="=r,r",
                has_side_effect=True,
            ](is_below)
            var owner = UInt32(inlined_assembly["popc.b32 $0, $1;", UInt32, constraints="=r,r"](mask))
            var owner_begin = Int(shuffle_idx(Int32(begin), owner))
            var owner_rows = Int(shuffle_idx(Int32(rows), owner))
            var owner_through = Int(shuffle_idx(through, owner))
            var owner_tiles = Int(shuffle_idx(tiles, owner))
            var offset = (index - before - (owner_through - owner_tiles)) * tile_rows
            var expert = Int(ids[unsafe_offset=first + Int(owner)])
            if expert < 0:
                return Tile(0, 0, 0)
            return Tile(expert, owner_begin + offset, min(owner_rows - offset, tile_rows))
        before += total
    return Tile(0, 0, 0)
