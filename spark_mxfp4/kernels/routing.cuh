// From routing table to sorted rows, all on the device: which expert owns which rows, and the tokens in that order.
//
// A *row* is one pair of token and expert. Each expert's rows begin at a multiple of eight, because the matrix
// instruction's swizzle repeats every eight rows. Activations of all rows lie in planes of 64 columns:
// [columns / 64][rows][128 bytes], the bytes of each row exchanged as 128-byte swizzling wants it, so that the tile of
// any rows is one contiguous piece of memory that one bulk copy brings in.
#pragma once
#include "overlap.cuh"
#include <cstdint>

namespace spark {

constexpr int ROUTE_THREADS = 1024;
constexpr int ROUTE_WARPS = ROUTE_THREADS / 32;
constexpr int MAX_EXPERTS = 512;

struct Routing {
  const void* ids;        // int32 or int64 [pairs], the flattened routing table
  const int32_t* map;     // global expert -> local expert or -1; null when all experts are here
  int ids_are_64_bit;
  int pairs, top_k, experts, global_experts;
  int tile_tokens;        // most tokens of a tile
  int row_multiple;       // of which each expert's first row is one
  int32_t* row_of_pair;   // [pairs], -1 where the expert is not here
  int4* tiles;            // {expert, first row, tokens, 0}
  int32_t* tile_count;    // [1]
};

__device__ __forceinline__ int local_expert(const Routing& r, int pair) {
  int64_t id = r.ids_are_64_bit ? static_cast<const int64_t*>(r.ids)[pair] : static_cast<const int32_t*>(r.ids)[pair];
  if (id < 0) return -1;
  if (r.map != nullptr) id = id < r.global_experts ? r.map[id] : -1;
  return id < r.experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ int padded_rows(const Routing& r, int tokens) {
  return (tokens + r.row_multiple - 1) / r.row_multiple * r.row_multiple;
}

// Inclusive sum over the first MAX_EXPERTS threads of the block; every thread of the block must call it.
__device__ __forceinline__ int block_sum(int value, int* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += scratch[w];
  __syncthreads();
  return value;
}

// Call `each(pair, expert)` for pair, pair + 32, ... below end, together with the other lanes; eight loads at a time.
template <class Each>
__device__ __forceinline__ void for_each_pair(const Routing& r, int pair, int end, Each each) {
  constexpr int AT_ONCE = 8;
  for (; __any_sync(~0u, pair < end); pair += 32 * AT_ONCE) {
    int experts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) experts[i] = pair + 32 * i < end ? local_expert(r, pair + 32 * i) : -1;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) each(pair + 32 * i, experts[i]);
  }
}

// Sort all pairs by expert, tokens in order within each. Each block that calls this does the whole work in its own
// shared memory (`counts` int [ROUTE_WARPS][experts], `scratch` int [ROUTE_WARPS]); only the writer stores tiles.
// `rows` [pairs] gets every pair's row, -1 where the expert is not here.
__device__ __forceinline__ void route(const Routing& r, int* counts, int* scratch, int* rows, bool writer) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, me = threadIdx.x;
  const int share = (r.pairs + ROUTE_WARPS * 32 - 1) / (ROUTE_WARPS * 32) * 32;
  const int warps = (r.pairs + share - 1) / share;  // that have pairs
  const int begin = warp * share, end = min(begin + share, r.pairs);
  int* mine = counts + warp * r.experts;
  for (int i = me; i < warps * r.experts; i += ROUTE_THREADS) counts[i] = 0;
  __syncthreads();
  for_each_pair(r, begin + lane, end, [&](int pair, int expert) {
    const unsigned same = __match_any_sync(~0u, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    const int earlier = expert >= 0 ? mine[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) mine[expert] = earlier + __popc(same);
    __syncwarp();
    if (pair < end) rows[pair] = earlier + before;  // among this warp's pairs of the expert, for now
  });
  __syncthreads();
  int tokens = 0;
  if (me < r.experts) {
    for (int w = 0; w < warps; ++w) {
      const int here = counts[w * r.experts + me];
      counts[w * r.experts + me] = tokens;
      tokens += here;
    }
  }
  const int padded = padded_rows(r, tokens);
  const int tile_number = (tokens + r.tile_tokens - 1) / r.tile_tokens;
  const int first_row = block_sum(padded, scratch) - padded;
  const int last_tile = block_sum(tile_number, scratch);
  if (me < r.experts) {
    for (int w = 0; w < warps; ++w) counts[w * r.experts + me] += first_row;
  }
  if (writer) {
    if (me == r.experts - 1) *r.tile_count = last_tile;
    // Tiles of one expert are about equal: 260 tokens are two tiles of 136, not 256 and 4.
    const int size = tile_number > 0 ? ((tokens + tile_number - 1) / tile_number + 7) & ~7 : 0;
    for (int i = 0; i < tile_number; ++i)
      r.tiles[last_tile - tile_number + i] = make_int4(me, first_row + i * size, min(size, tokens - i * size), 0);
  }
  __syncthreads();
  for_each_pair(r, begin + lane, end, [&](int pair, int expert) {
    if (pair < end) rows[pair] = expert >= 0 ? mine[expert] + rows[pair] : -1;
  });
}

// Up to 32 pairs, one a lane, sorted by one warp in registers: the pair's expert, tile, the tile's first row and tokens,
// and the pair's place in the tile.
struct Sorted {
  int expert, tokens, tile, first_row, place;
  bool first;  // of its tile's pairs
};

// False for more pairs, which this does not sort; the same for the whole warp.
__device__ __forceinline__ bool sort_few(const Routing& r, Sorted& s) {
  if (r.pairs > 32) return false;
  const int lane = threadIdx.x & 31;
  s.expert = lane < r.pairs ? local_expert(r, lane) : -1;
  const unsigned same = __match_any_sync(~0u, s.expert);
  const int all = __popc(same), before = __popc(same & ((1u << lane) - 1));
  s.tile = before / r.tile_tokens, s.first_row = s.tile * r.tile_tokens, s.place = before - s.first_row;
  s.tokens = min(all - s.first_row, r.tile_tokens), s.first = s.expert >= 0 && s.place == 0;
  // One lane speaks for each expert, of its tiles and rows.
  const bool speaks = s.expert >= 0 && before == 0;
  const int mine = (all + r.tile_tokens - 1) / r.tile_tokens | padded_rows(r, all) << 8;
  for (unsigned speakers = __ballot_sync(~0u, speaks); speakers != 0; speakers &= speakers - 1) {
    const int other = __ffs(speakers) - 1, expert = __shfl_sync(~0u, s.expert, other), its = __shfl_sync(~0u, mine, other);
    if (expert < s.expert) s.tile += its & 0xFF, s.first_row += its >> 8;
  }
  return true;
}

// Where 16 bytes of a row lie: `vector` counts them along the row.
__device__ __forceinline__ int64_t swizzled(int64_t row, int vector, int64_t rows) {
  return ((vector / 8) * rows + row) * 8 + ((vector & 7) ^ (row & 7));
}

// Columns of a plane are kept in the order in which a thread's weights of one scale belong to the matrix instruction's
// steps (layout.py): step, bit 1 of the column, its block of 32, bit 2, bit 0. One vector is four pairs of columns.
__device__ __forceinline__ void copy_row(const uint32_t* from, uint4* to, int row, int pairs, int vectors, int64_t rows,
                                         int lane, int lanes) {
  for (int i = lane; i < vectors; i += lanes) {
    const int first = i / 8 * 32 + i % 8 / 2 * 4 + (i & 1);
    const bool second = first + 16 < pairs;
    const uint4 four = {from[first], from[first + 2], second ? from[first + 16] : 0, second ? from[first + 18] : 0};
    to[swizzled(row, i, rows)] = four;
  }
}

// As they come, row after row, with zeros where a row has no columns: for layer.cuh.
__device__ __forceinline__ void copy_row_as_it_is(const uint32_t* from, uint4* to, int row, int pairs, int vectors,
                                                  int lane, int lanes) {
  for (int i = lane; i < vectors; i += lanes)
    to[int64_t{row} * vectors + i] = i * 4 < pairs ? reinterpret_cast<const uint4*>(from)[i] : uint4{};
}

}  // namespace spark
