// Scheduling for layer.cuh: the sort of few pairs, the work items of a block, and the sentinel value that marks results
// as missing.
#pragma once
#include "routing.cuh"
#include "tiles.cuh"

namespace spark {

constexpr int FEW_PAIRS = 32;  // the most pairs that sort_few sorts
constexpr uint32_t MISSING = ~0u;  // the sentinel, two bf16 or one float32: a NaN that no instruction produces

__device__ __forceinline__ bool missing(const uint4& v) {
  return v.x == MISSING || v.y == MISSING || v.z == MISSING || v.w == MISSING;
}

// Spin-wait with back-off, because polling takes bandwidth from the blocks that produce the result.
struct Backoff {
  int polls = 0;
  __device__ void wait() {
    if (++polls > 8) __nanosleep(300);
  }
};

// The sorted tiles of up to 32 pairs, in the shared memory of a block.
struct Few {
  int4 tiles[FEW_PAIRS];  // {expert, first row, tokens, 0}
  int rows[FEW_PAIRS];    // row of each pair
  int tokens[FEW_PAIRS];  // token of each row
  int count;
};

// Sorts the pairs into `few`. Called by one warp.
__device__ __forceinline__ void sort_into(const Routing& r, Few& few) {
  const int lane = threadIdx.x & 31;
  Sorted s;
  sort_few(r, s);
  const bool here = lane < r.pairs && s.expert >= 0;
  few.rows[lane] = here ? s.first_row + s.place : -1;
  if (here) few.tokens[s.first_row + s.place] = lane / r.top_k;
  if (here && s.first) few.tiles[s.tile] = make_int4(s.expert, s.first_row, s.tokens, 0);
  const int count = __popc(__ballot_sync(~0u, here && s.first));
  if (lane == 0) few.count = count;
}

// The sorted tiles, from the block's own sort or from the sorting kernel.
struct Tiles {
  const int4* at;
  const int32_t *count, *token_of_row, *row_of_pair;
};

struct Item {
  Tile tile;
  int begin, end;  // chunks; `end` is 0 if there are no more items
  int part;
  bool second;
};

// The queue of a block's items. The producer of weights pushes; all other warps read. A slot is reused without a
// barrier. Reuse is safe because each item has at least one stage and the ring has fewer stages than the queue has
// slots: when the producer pushes an item, warps may still read only items with stages in the ring.
constexpr int QUEUE = 8;
struct Queue {
  Item items[QUEUE];
  uint64_t pushed[QUEUE];

  __device__ uint32_t bar(int number) const { return shared_address(pushed + number % QUEUE); }
  __device__ void init() {
    for (int i = 0; i < QUEUE; ++i) barrier_init(bar(i), 1);
  }
  __device__ void push(const Item& item, int number) {
    items[number % QUEUE] = item;
    barrier_arrive(bar(number));
  }
  __device__ Item pull(int number) const {
    barrier_wait(bar(number), number / QUEUE & 1);
    return items[number % QUEUE];
  }
};

template <class S>
__device__ __forceinline__ int row_blocks(const Gemm& g) { return (g.row_tiles + S::ROW_GROUPS - 1) / S::ROW_GROUPS; }

// Returns item number `index`. The items of the first product come first. After the last item, `end` is 0.
template <class S>
__device__ __forceinline__ Item item_at(const Layer& l, const Tiles& tiles, int index) {
  const int blocks = row_blocks<S>(l.first), firsts = *tiles.count * blocks;
  Item item{};
  item.second = index >= firsts;
  if (item.second) {
    const int seconds = row_blocks<S>(l.second), of_tile = seconds * l.parts, rest = (index - firsts) % of_tile;
    const int number = (index - firsts) / of_tile;
    if (number >= *tiles.count) return item;
    item.part = rest / seconds, item.tile.row_tile = rest % seconds * S::ROW_GROUPS;
    item.tile.tokens = tiles.at[number];
  } else {
    item.tile.tokens = tiles.at[index / blocks], item.tile.row_tile = index % blocks * S::ROW_GROUPS;
  }
  item.begin = item.part * l.part_chunks;
  item.end = item.second ? min(item.begin + l.part_chunks, l.second.chunks) : l.first.chunks;
  return item;
}

}  // namespace spark
