// The producers of layer.cuh: one thread loads weights; one warp for every 8 or 16 tokens loads activations.
#pragma once
#include "layer_items.cuh"
#include "pace.cuh"

namespace spark {

constexpr int EIGHT = 8;  // tokens of one matrix instruction
// Rows that one producer warp of activations loads. More than seven such warps would leave the other warps too few
// registers.
template <class S>
constexpr int PRODUCER_ROWS = S::TOKENS > 32 ? 16 : 8;
template <class S>
constexpr int PRODUCER_WARPS = S::TOKENS / PRODUCER_ROWS<S>;

// A ring buffer with two barriers for a full stage: `full` for the weights and `rows_full` for the activations.
template <class S>
struct LayerRing : Ring<S> {
  uint32_t rows_full;
  __device__ LayerRing(uint8_t* base, const uint64_t* rows_full) : Ring<S>(base), rows_full(shared_address(rows_full)) {}
  __device__ uint32_t rows_full_bar() const { return rows_full + 8 * this->stage; }
};

// The producer of weights, one thread. It keeps only as many stages in flight as the full memory bandwidth needs,
// because all other memory accesses wait behind them.
template <class S>
struct Weights {
  static_assert(QUEUE > S::STAGES);
  LayerRing<S> ring, landing, first;  // the stage to fill next, the oldest stage in flight, the item's first stage
  uint64_t once = leave_first();
  Item item;
  int number = 0, on_the_way = 0;

  __device__ Weights(const LayerRing<S>& ring) : ring(ring), landing(ring), first(ring) {}
  __device__ void begin(Queue& queue, const Item& next) {
    queue.push(next, number++);
    item = next, first = ring;
  }
  __device__ void load(const Layer& l) {
    Copies<S> copies(item.second ? l.second : l.first, item.tile, once, once);
    copies.chunks = item.end;
    const int at_once = item.second ? l.second_at_once : l.first_at_once;
    for (int chunk = item.begin; chunk < item.end; chunk += S::CHUNKS, ring.next()) {
      barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
      for (; on_the_way >= at_once; --on_the_way, landing.next()) barrier_wait(landing.full_bar(), landing.parity);
      wait_for_memory(copies.chunks_at(chunk) * copies.groups * CHUNK_BYTES);
      copies.weights(ring, chunk, 0), ++on_the_way;
    }
  }
  __device__ static int take_item(const Layer& l, uint32_t grid_ready) {
    barrier_wait(grid_ready, 0);
    return atomicAdd(l.taken, 1);
  }
  // Loads the weights of all items of the block. The block's index determines the first two items; the others come from
  // the shared counter, until there are none left.
  __device__ void load_all(const Layer& l, Queue& queue, const Tiles& tiles, uint32_t grid_ready) {
    begin(queue, item_at<S>(l, tiles, blockIdx.x));
    while (item.end > 0) {
      const bool take = number > 1, early = take && !item.second;  // early, to hide the atomic's latency
      int next = blockIdx.x;
      if (early) next = gridDim.x + take_item(l, grid_ready);
      load(l);
      if (item.second) {
        // Take the next item only after consumers have released this item's first stage. Otherwise some blocks would
        // take several items too early. If the item has more stages than the ring, load() has already waited.
        const bool waited = item.end - item.begin > S::STAGES * S::CHUNKS;
        if (!waited) barrier_wait(ring.empty_bar(first.stage), first.parity);
      }
      if (take && !early) next = gridDim.x + take_item(l, grid_ready);
      const Item another = item_at<S>(l, tiles, gridDim.x + next);
      if (another.end == 0) barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
      begin(queue, another);
    }
    barrier_arrive(ring.full_bar());
  }
};

// A value for `first` that the compiler knows to be 0.
struct Zero {
  __device__ constexpr operator int() const { return 0; }
};
// Loads the activations of up to 2^SHIFT rows, from row `first` of the tile on, for AT_ONCE stages. In each round a
// warp loads 16 bytes per lane: 64 columns for each of four rows or chunks. It keeps them in registers, then stores
// them to the ring in the order in which multiply_item reads them.
template <class S, int SHIFT, class First>
struct Activations {
  static constexpr int ROUNDS = ((S::CHUNKS << SHIFT) + 3) / 4;  // per stage
  static constexpr int FITS = (S::CHUNKS < 3 ? 8 : 2 * S::CHUNKS) / ROUNDS, AT_ONCE = FITS < S::STAGES ? FITS : S::STAGES;
  uint4 vectors[AT_ONCE][ROUNDS];
  static constexpr int ROWS = SHIFT > 2 ? 1 << (SHIFT - 2) : 1;
  const uint8_t* rows[ROWS];  // this lane's row in round r is rows[r % ROWS]; null: no such row
  int last;                // end of the columns that exist, in bytes
  First first;

  __device__ Activations(const Layer& l, const Tiles& tiles, const Item& item, First first) : first(first) {
    const Input& from = item.second ? l.hidden : l.x;
    last = min(item.end * PLANE_BYTES, from.vectors * 16);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int token = first + row_of_round(i);
      rows[i] = nullptr;
      if (token >= item.tile.tokens.z) continue;
      const int sorted = item.tile.tokens.y + token, row = item.second ? sorted : tiles.token_of_row[sorted];
      rows[i] = from.at + row * from.stride + (threadIdx.x & 7) * 16;
    }
  }
  __device__ static int row_of_round(int r) { return (r * 4 + (threadIdx.x >> 3 & 3)) & ((1 << SHIFT) - 1); }
  __device__ static int chunk_of_round(int r) { return (r * 4 + (threadIdx.x >> 3 & 3)) >> SHIFT; }

  // Loads AT_ONCE stages from `chunk` on. FRESH: other blocks may be storing the data. AGAIN: only missing data.
  template <bool FRESH, bool AGAIN>
  __device__ __forceinline__ void load(int chunk) {
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r) {
        if (AGAIN && !missing(vectors[u][r])) continue;
        if (!AGAIN) vectors[u][r] = uint4{};
        const uint8_t* row = rows[r % ROWS];
        const int at = (chunk + u * S::CHUNKS + chunk_of_round(r)) * PLANE_BYTES;
        if (row == nullptr || chunk_of_round(r) >= S::CHUNKS || at + (threadIdx.x & 7) * 16 >= last) continue;
        vectors[u][r] = FRESH ? load_fresh(row + at) : *reinterpret_cast<const uint4*>(row + at);
      }
    }
  }
  __device__ __forceinline__ bool any_missing() const {
    bool any = false;
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r) any |= missing(vectors[u][r]);
    }
    return __any_sync(~0u, any);
  }
  // Stores the loaded stages to the ring. A row of 64 columns is eight vectors of 16 bytes. Lanes l with l%4 = v%4 read
  // vector v. In even rows, vectors 0 to 3 are for the first two of the four steps and vectors 4 to 7 for the last two;
  // in odd rows the two halves are swapped. So eight lanes, which read two rows, access all banks.
  __device__ __forceinline__ void store(LayerRing<S>& ring, int chunk, int end) const {
    const int n = threadIdx.x & 7;
    const uint32_t place = ring.x + first * PLANE_BYTES + (n >> 2) * 32 + (n & 1) * 8;
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (chunk + u * S::CHUNKS >= end) break;
      barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r) {
        const int row = row_of_round(r);
        const uint32_t to = place + ring.stage * S::X_BYTES + (chunk_of_round(r) * S::TOKENS + row) * PLANE_BYTES +
                            ((n >> 1 & 1) ^ (row & 1)) * 64;
        if (chunk_of_round(r) >= S::CHUNKS) continue;
        store_shared(to, vectors[u][r].x, vectors[u][r].y);
        store_shared(to + 16, vectors[u][r].z, vectors[u][r].w);
      }
      barrier_arrive(ring.rows_full_bar());
      ring.next();
    }
  }
};

// Stores the sentinel in this block's share of the memory for exchanged results (block 0 also resets the counter of
// items), and arrives at the grid barrier. Until all blocks have arrived, no block may read or store such results, or
// take an item from the counter. `wait` waits for all blocks, then completes the block's barrier `grid_ready`.
struct GridBarrier {
  uint32_t grid_ready, phase;
  bool waiting = true;

  __device__ GridBarrier(const Layer& l, uint32_t grid_ready) : grid_ready(grid_ready) {
    const int lane = threadIdx.x & 31;
    const int64_t rows = l.first.rows, hidden = rows * l.hidden.stride / 16;
    const int64_t all = hidden + rows * l.parts * l.second.row_tiles * 16;
    for (int64_t i = blockIdx.x * 32 + lane; i < all; i += gridDim.x * 32) {
      uint4* to = i < hidden ? reinterpret_cast<uint4*>(l.first.out) + i : reinterpret_cast<uint4*>(l.partial) + (i - hidden);
      *to = {MISSING, MISSING, MISSING, MISSING};
    }
    if (blockIdx.x == 0 && lane == 0) *l.taken = 0;
    __threadfence();
    __syncwarp();
    if (lane == 0) phase = arrive_at_grid();
  }
  __device__ void wait() {
    if (waiting && (threadIdx.x & 31) == 0) {
      wait_for_grid(phase);
      barrier_arrive(grid_ready);
    }
    __syncwarp();
    waiting = false;
  }
};

template <class S, int SHIFT, class First, class Wait>
__device__ __forceinline__ void load_item(const Layer& l, const Tiles& tiles, const Item& item, LayerRing<S>& ring,
                                          First first, Wait wait_for_grid) {
  Activations<S, SHIFT, First> activations(l, tiles, item, first);
  for (int chunk = item.begin; chunk < item.end; chunk += activations.AT_ONCE * S::CHUNKS) {
    if (item.second) {
      wait_for_grid();
      activations.template load<true, false>(chunk);
      for (Backoff backoff; activations.any_missing(); backoff.wait()) activations.template load<true, true>(chunk);
    } else {
      activations.template load<false, false>(chunk);
    }
    activations.store(ring, chunk, item.end);
    wait_for_grid();  // after the first store, because the ring is empty and the store does not block
  }
}

// Arrives at the barriers without loading, for rows without a token. No result depends on their contents.
template <class S>
__device__ __forceinline__ void load_nothing(const Item& item, LayerRing<S>& ring) {
  for (int chunk = item.begin; chunk < item.end; chunk += S::CHUNKS, ring.next()) {
    barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
    barrier_arrive(ring.rows_full_bar());
  }
}

// Loads the activations of all items, for the rows from `first` on. Called by one warp.
template <class S, class First, class Wait>
__device__ __forceinline__ void load_activations(const Layer& l, const Tiles& tiles, LayerRing<S> ring,
                                                 const Queue& queue, First first, Wait wait_for_grid) {
  for (int number = 0;; ++number) {
    const Item item = queue.pull(number);
    if (item.end == 0) break;
    const int tokens = item.tile.tokens.z - first;
    if (tokens <= 0) {
      load_nothing<S>(item, ring);  // not for first = 0, because every tile has a token
    } else if (tokens == 1) {
      load_item<S, 0>(l, tiles, item, ring, first, wait_for_grid);
    } else if (tokens == 2) {
      load_item<S, 1>(l, tiles, item, ring, first, wait_for_grid);
    } else if (tokens <= 4) {
      load_item<S, 2>(l, tiles, item, ring, first, wait_for_grid);
    } else if (PRODUCER_ROWS<S> == 8 || tokens <= 8) {
      load_item<S, 3>(l, tiles, item, ring, first, wait_for_grid);
    } else {
      load_item<S, 4>(l, tiles, item, ring, first, wait_for_grid);
    }
  }
}

}  // namespace spark
