// Sorting of the routing table on the device: the rows of each expert, and the token of each row.
//
// A *row* is one pair of token and expert. Each expert's first row is a multiple of `row_multiple`, which is eight if
// activations are stored in planes of 64 columns, [columns / 64][rows][128 bytes]. Planes are stored with the swizzle
// of the matrix instruction, which permutes the bytes of each row in a pattern that repeats every eight rows. Tiles
// start at a multiple of eight, so one bulk copy moves a tile's rows of a plane to shared memory without changes.
#pragma once
#include "arguments.cuh"

namespace spark {

constexpr int MAX_EXPERTS = 512;

__device__ __forceinline__ int local_expert(const Routing& r, int pair) {
  int64_t id = r.ids_are_64_bit ? static_cast<const int64_t*>(r.ids)[pair] : static_cast<const int32_t*>(r.ids)[pair];
  if (id < 0) return -1;
  if (r.map != nullptr) id = id < r.global_experts ? r.map[id] : -1;
  return id < r.experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ int padded_rows(const Routing& r, int tokens) {
  return (tokens + r.row_multiple - 1) / r.row_multiple * r.row_multiple;
}

// A lane's pair after sort_few: its expert, the tokens, number and first row of its tile, and its place in the tile.
struct Sorted {
  int expert, tokens, tile, first_row, place;
  bool first;  // this is the first pair of its tile
};

// Sorts up to 32 pairs in registers, one pair per lane. All lanes of a warp must call this function. If there are more
// pairs, it sorts nothing and returns false.
__device__ __forceinline__ bool sort_few(const Routing& r, Sorted& s) {
  if (r.pairs > 32) return false;
  const int lane = threadIdx.x & 31;
  s.expert = lane < r.pairs ? local_expert(r, lane) : -1;
  const unsigned same = __match_any_sync(~0u, s.expert);
  const int all = __popc(same), before = __popc(same & ((1u << lane) - 1));
  s.tile = before / r.tile_tokens, s.first_row = s.tile * r.tile_tokens, s.place = before - s.first_row;
  s.tokens = min(all - s.first_row, r.tile_tokens), s.first = s.expert >= 0 && s.place == 0;
  // The first lane of each expert broadcasts the expert's number of tiles and of rows; pairs of later experts add them.
  const bool speaks = s.expert >= 0 && before == 0;
  const int mine = (all + r.tile_tokens - 1) / r.tile_tokens | padded_rows(r, all) << 8;
  for (unsigned speakers = __ballot_sync(~0u, speaks); speakers != 0; speakers &= speakers - 1) {
    const int other = __ffs(speakers) - 1, expert = __shfl_sync(~0u, s.expert, other), its = __shfl_sync(~0u, mine, other);
    if (expert < s.expert) s.tile += its & 0xFF, s.first_row += its >> 8;
  }
  return true;
}

}  // namespace spark
