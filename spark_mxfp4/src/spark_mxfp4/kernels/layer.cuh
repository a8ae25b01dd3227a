// One launch computes both products and the weighted sum of a layer of few tokens. Weights stream without a pause.
//
// An item of work is ROW_GROUPS tiles of 64 weight rows by up to TOKENS tokens of one expert. It covers all columns for the
// first product and one of `parts` for the second. Blocks take items from a shared counter: all items of the first product
// come before those of the second. In each block one producer thread loads weights into a ring buffer and waits only for
// free stages; one producer warp for every 8 or 16 tokens loads activations. Up to 32 pairs are sorted by each block itself,
// so no sorting kernel has to run first.
//
// The kernel uses bulk copies, mbarriers, mma.sync and a cooperative launch. It uses no clusters, no wgmma and no setmaxnreg,
// so the same source is compiled for compute capability 9.0 and 12.1.
//
// Results shared between blocks are polled for a sentinel: each place holds MISSING, which is never a result, until the
// result is stored. No flag has to be set or read. Parts are stored as float32 and added at the end in a fixed order, so the
// sum does not depend on which block computed which part. Blocks wait for each other, hence the cooperative launch.
#pragma once
#include "gemm.cuh"
#include "pace.cuh"
#include "routing.cuh"

namespace spark {

// Activations as the kernel reads them: `vectors` of 16 bytes for each row.
struct Rows {
  const uint8_t* at;
  int64_t stride;  // bytes
  int vectors;
};

struct Layer {
  Gemm first, second;     // second.out is the layer's result [tokens][columns]; `tiles` where sorted
  Routing routing;
  Rows x, hidden;         // x [tokens]; hidden [rows] is first.out
  float* partial;         // [rows][parts][second.row_tiles · 64]
  int32_t* taken;         // how many items are taken from the counter
  const float* shares;         // [pairs]
  int sorted;             // by a kernel before
  int parts, part_chunks, tokens, top_k;
  int first_at_once, second_at_once;  // stages of weights in flight, for the first and the second product
};

// Launch the kernel of shape number `shape` on `processors` multiprocessors.
int layer(const Layer* l, int shape, int processors, cudaStream_t stream);
int layer_chunks(int shape);  // chunks of one stage; 0 if there is no such shape
int layer_tokens(int shape);  // most tokens of a tile; 0 if there is no such shape

constexpr int EIGHT = 8;  // tokens of one matrix instruction
// Rows that each producer warp of activations loads. More than seven such warps would leave the others too few registers.
template <class S>
constexpr int PRODUCER_ROWS = S::TOKENS > 32 ? 16 : 8;
template <class S>
constexpr int PRODUCER_WARPS = S::TOKENS / PRODUCER_ROWS<S>;

// The shapes by number. Shapes 1 to 3 need Hopper's shared memory; the others need at most 99 KB a block, 12.1's limit.
// `rows of 64` is the number of row tiles of an item.
//         number, rows of 64, split of the columns, chunks a step, tokens, stages, blocks a multiprocessor
#define SPARK_SMALL_LAYERS(SHAPE)  \
  SHAPE(4, 1, 3, 3, 8, 3, 1)       \
  SHAPE(5, 3, 1, 3, 8, 4, 1)       \
  SHAPE(6, 2, 2, 2, 8, 4, 1)       \
  SHAPE(7, 3, 1, 2, 16, 5, 1)      \
  SHAPE(8, 3, 1, 2, 32, 4, 1)      \
  SHAPE(9, 2, 1, 1, 64, 6, 1)
#define SPARK_LARGE_LAYERS(SHAPE)  \
  SHAPE(1, 1, 2, 3, 8, 5, 2)       \
  SHAPE(2, 2, 1, 5, 8, 4, 2)       \
  SHAPE(3, 3, 1, 5, 8, 5, 1)

// Return what `use` returns for shape `number`, or `none` if there is no such shape.
template <class Use, class Result>
Result with_shape(int number, Use use, Result none) {
  switch (number) {
#define SPARK_CASE(number, ...) case number: return use(Shape<__VA_ARGS__>());
    SPARK_SMALL_LAYERS(SPARK_CASE)
#ifndef SPARK_SMALL
    SPARK_LARGE_LAYERS(SPARK_CASE)
#endif
#undef SPARK_CASE
    default: return none;
  }
}
constexpr int FEW_PAIRS = 32;  // as many as sort_few sorts
constexpr uint32_t MISSING = ~0u;  // the sentinel, two bf16 or one float32: a NaN that no instruction makes

__device__ __forceinline__ bool missing(const uint4& v) {
  return v.x == MISSING || v.y == MISSING || v.z == MISSING || v.w == MISSING;
}

// Spin-wait with back-off: polling takes bandwidth from the blocks that produce the result.
struct Backoff {
  int polls = 0;
  __device__ void wait() {
    if (++polls > 8) __nanosleep(300);
  }
};

// Up to 32 pairs, sorted by the block itself.
struct Few {
  int4 tiles[FEW_PAIRS];  // {expert, first row, tokens, 0}
  int rows[FEW_PAIRS];    // of pairs
  int tokens[FEW_PAIRS];  // of rows
  int count;
};

// Sort the pairs into `few`. Called by one warp.
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
  int begin, end;  // chunks; no more items where end is 0
  int part;
  bool second;
};

// Queue of a block's items, filled by the producer of weights. A slot can be reused without a barrier of its own: before the
// producer pushes an item it has waited for all stages but those in the ring, and the ring has fewer stages than QUEUE.
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

// Return the item of an index. Items of the first product come first; behind the last one, `end` is 0.
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

// The ring's `full` barrier covers the weights, and `rows_full` the activations.
template <class S>
struct LayerRing : Ring<S> {
  uint32_t rows_full;
  __device__ LayerRing(uint8_t* base, const uint64_t* rows_full) : Ring<S>(base), rows_full(shared_address(rows_full)) {}
  __device__ uint32_t rows_full_bar() const { return rows_full + 8 * this->stage; }
};

// The producer of weights, one thread. It keeps few stages in flight: enough for the memory's bandwidth; with more, every
// other access to memory would wait behind them.
template <class S>
struct Weights {
  static_assert(QUEUE > S::STAGES);
  LayerRing<S> ring, landing, first;  // where the next stage goes, the oldest in flight, the item's first
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
  // The block's first two items are the same each time; then takes items until there are none.
  __device__ void load_all(const Layer& l, Queue& queue, const Tiles& tiles, uint32_t grid_ready) {
    begin(queue, item_at<S>(l, tiles, blockIdx.x));
    while (item.end > 0) {
      const bool take = number > 1, early = take && !item.second;  // ask early: the counter's answer takes a while
      int next = blockIdx.x;
      if (early) next = gridDim.x + take_item(l, grid_ready);
      load(l);
      if (item.second) {  // is being multiplied before the next is taken, or some blocks would take several too early
        const bool waited = item.end - item.begin > S::STAGES * S::CHUNKS;  // for room in its first stage
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

// Activations of up to 2^SHIFT rows for some stages, from row `first` of the tile on. A warp loads 16 bytes for each lane and
// round and stores them from registers in the order in which multiply_item reads them. A round is 4 × 64 columns of a row.
struct Zero {
  __device__ constexpr operator int() const { return 0; }
};
template <class S, int SHIFT, class First>
struct Activations {
  static constexpr int ROUNDS = ((S::CHUNKS << SHIFT) + 3) / 4;  // of a stage
  static constexpr int FITS = (S::CHUNKS < 3 ? 8 : 2 * S::CHUNKS) / ROUNDS, AT_ONCE = FITS < S::STAGES ? FITS : S::STAGES;  // stages
  uint4 vectors[AT_ONCE][ROUNDS];
  static constexpr int ROWS = SHIFT > 2 ? 1 << (SHIFT - 2) : 1;
  const uint8_t* rows[ROWS];  // this lane's, of its rounds in turn
  int last;                // behind the columns that there are, in bytes
  First first;

  __device__ Activations(const Layer& l, const Tiles& tiles, const Item& item, First first) : first(first) {
    const Rows& from = item.second ? l.hidden : l.x;
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

  // Load those of the stages from `chunk` on; poll again where they are still missing.
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
  // Vector v of 64 columns has, for the threads with l%4 = v%4, what two of the four steps take, v/4 of even rows and the
  // other half of odd ones, so that eight threads read 128 bytes.
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

// Fill everything that blocks share with the sentinel, and reset the counter of items. No block reads or stores shared
// results, or takes items, before all blocks have done their part; the block's barrier `grid_ready` is released then.
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
    wait_for_grid();  // the first stages need no wait: the ring is empty
  }
}

// Rows without a token: their contents enter no result, so only the barriers are signalled.
template <class S>
__device__ __forceinline__ void load_nothing(const Item& item, LayerRing<S>& ring) {
  for (int chunk = item.begin; chunk < item.end; chunk += S::CHUNKS, ring.next()) {
    barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
    barrier_arrive(ring.rows_full_bar());
  }
}

// Load the activations of all items, for the rows from `first` on. Called by one warp.
template <class S, class First, class Wait>
__device__ __forceinline__ void load_activations(const Layer& l, const Tiles& tiles, LayerRing<S> ring,
                                                 const Queue& queue, First first, Wait wait_for_grid) {
  for (int number = 0;; ++number) {
    const Item item = queue.pull(number);
    if (item.end == 0) break;
    const int tokens = item.tile.tokens.z - first;
    if (tokens <= 0) {
      load_nothing<S>(item, ring);  // never for first = 0
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

// Multiply one item. `sum` gets this warp's sums, 16 rows for each 8 tokens; the ring moves behind the item's last chunk.
template <class S>
__device__ __forceinline__ void multiply_item(int chunks, int tokens, LayerRing<S>& ring, int group, int split,
                                              float (&sum)[S::TOKENS / 2]) {
  constexpr int EIGHTS = S::TOKENS / EIGHT;
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, token = lane / 4, half = (token & 1) * 64;
  const int first_part = split * S::STEP;
  // This thread's places in the ring's first stage.
  const uint32_t values = shared_address(ring.w) + (group * S::CHUNKS + first_part) * CHUNK_BYTES + 16 * thread;
  const uint32_t scales = values - 16 * thread + VALUE_BYTES + 2 * (thread >> 1);
  const uint32_t x = ring.x + (first_part * S::TOKENS + token) * PLANE_BYTES + (lane & 3) * 16 + half;
  // With 8 tokens, two sets of sums alternate, so that no product waits for the one before.
  constexpr int CHAINS = EIGHTS == 1 ? 2 : 1;
  float sums[EIGHTS][CHAINS][4] = {};
  const auto weights = [&](uint32_t w_at, uint32_t (&words)[4], uint32_t (&factor)[2]) {
    load_shared(words, values + w_at);
    scale_pairs(load_shared_16(scales + w_at), factor);
  };
  const auto expand = [&](uint32_t word, const uint32_t (&factor)[2], uint32_t (&a)[4]) {
    expand_word(word, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = multiply(a[i], factor[i & 1]);
  };
  const auto one_chunk = [&](uint32_t w_at, uint32_t x_at) {
    uint32_t words[4], factor[2];
    weights(w_at, words, factor);
    if constexpr (EIGHTS == 1) {  // expand the weights of one step at a time, which takes fewer registers
      uint32_t b[2][4];
      load_shared(b[0], x + x_at);
      load_shared(b[1], (x ^ 64) + x_at);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t a[4];
        expand(words[step], factor, a);
        mma(sums[0][step & 1], a, b[step / 2][step % 2 * 2], b[step / 2][step % 2 * 2 + 1]);
      }
    } else {
      uint32_t a[4][4];
#pragma unroll
      for (int step = 0; step < 4; ++step) expand(words[step], factor, a[step]);
#pragma unroll
      for (int n = 0; n < EIGHTS; n += 2) {  // two at a time: products of the same sums wait for each other
        if (n * EIGHT >= tokens) break;
        uint32_t b[2][2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t from = x_at + (n + i) * EIGHT * PLANE_BYTES;
          load_shared(b[i][0], x + from);
          load_shared(b[i][1], (x ^ 64) + from);
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            mma(sums[n + i][0], a[step], b[i][step / 2][step % 2 * 2], b[i][step / 2][step % 2 * 2 + 1]);
        }
      }
    }
  };
  for (int chunk = 0; chunk < chunks; chunk += S::CHUNKS, ring.next()) {
    const uint32_t w_at = ring.stage * S::W_BYTES, x_at = ring.stage * S::X_BYTES;
    barrier_wait(ring.full_bar(), ring.parity);
    barrier_wait(ring.rows_full_bar(), ring.parity);
    if (chunk + first_part + S::STEP <= chunks) {
#pragma unroll
      for (int u = 0; u < S::STEP; ++u) one_chunk(w_at + u * CHUNK_BYTES, x_at + u * S::TOKENS * PLANE_BYTES);
    } else {  // the item's last stage has fewer chunks
      for (int u = 0; u < chunks - chunk - first_part; ++u)
        one_chunk(w_at + u * CHUNK_BYTES, x_at + u * S::TOKENS * PLANE_BYTES);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty_bar(ring.stage));
  }
#pragma unroll
  for (int n = 0; n < EIGHTS; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[n * 4 + i] = sums[n][0][i];
      if constexpr (CHAINS == 2) sum[n * 4 + i] += sums[n][1][i];
    }
  }
}

// As gemm.cuh's store_swiglu, for rows: 8 tokens from `first` on.
__device__ __forceinline__ void store_hidden(const Layer& l, const Tile& tile, int row_tile, int first, const float* sum,
                                             const float (&bias)[2]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, token = first + lane / 4;
  const float low = activation(sum[0] + bias[0], sum[2] + bias[1], l.first);
  const float high = activation(sum[1] + bias[0], sum[3] + bias[1], l.first);
  const uint32_t pair = transpose_8x8(pack(low, high));
  auto* to = reinterpret_cast<uint32_t*>(l.first.out) + (tile.tokens.y + token) * (l.hidden.stride / 4);
  const int vector = (row_tile & 1) * 4 + warp;  // of the plane's eight, see layout.py
  if (token < tile.tokens.z) to[row_tile / 2 * 32 + pair_at(vector, lane & 3)] = pair;
}

__device__ __forceinline__ void store_part(const Layer& l, const Item& item, int row_tile, int first, const float* sum,
                                           const float (&bias)[2]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, token = first + (lane & 3) * 2;
  const int64_t width = l.second.row_tiles * 64, next = l.parts * width;
  float* to = l.partial + item.tile.tokens.y * next + item.part * width + row_tile * 64 + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (token + i >= item.tile.tokens.z) continue;
    to[(token + i) * next] = sum[i] + bias[0];
    to[(token + i) * next + 8] = sum[i + 2] + bias[1];
  }
}

// A token's 64 columns of the result from all parts, by one warpgroup: eight parts at once, four columns for each thread.
__device__ __forceinline__ void add_parts(const Layer& l, const Tiles& tiles, int row_tile, int token) {
  const int lane = threadIdx.x & 31, column = row_tile * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane & 3) * 4;
  const int64_t width = l.second.row_tiles * 64;
  float sum[4] = {};
  for (int part = lane >> 2; part < l.top_k * l.parts; part += 8) {
    const int of = l.parts == 1 ? part : l.parts == 2 ? part >> 1 : part / l.parts, pair = token * l.top_k + of;
    const int row = tiles.row_of_pair[pair];
    if (row < 0) continue;
    const float* from = l.partial + (int64_t{row} * l.parts + part - of * l.parts) * width + column;
    const float share = l.shares[pair];
    uint4 bits = load_fresh(from);
    for (Backoff backoff; missing(bits); backoff.wait()) bits = load_fresh(from);
    sum[0] += share * __uint_as_float(bits.x), sum[1] += share * __uint_as_float(bits.y);
    sum[2] += share * __uint_as_float(bits.z), sum[3] += share * __uint_as_float(bits.w);
  }
  __syncwarp();
#pragma unroll
  for (int other = 4; other < 32; other *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], other);
  }
  if (lane >= 4 || column >= l.second.columns) return;
  const uint2 four = {pack(sum[0], sum[1]), pack(sum[2], sum[3])};
  *reinterpret_cast<uint2*>(l.second.out + int64_t{token} * l.second.columns + column) = four;
}

template <class S>
__device__ __forceinline__ void work(const Layer& l, LayerRing<S>& ring, const Item& item, float* sums,
                                     uint32_t grid_ready) {
  const Gemm& g = item.second ? l.second : l.first;
  const int warpgroup = uniform(threadIdx.x >> 7), thread = threadIdx.x & 127;
  const int group = warpgroup / S::SPLIT, split = warpgroup % S::SPLIT, row_tile = item.tile.row_tile + group;
  const bool there = row_tile < g.row_tiles;
  const float* from = g.bias + (int64_t{item.tile.tokens.x} * g.row_tiles + (there ? row_tile : 0)) * 64;
  const int row = (thread >> 5) * 16 + (thread & 31) / 4;
  const float bias[2] = {item.part == 0 ? from[row] : 0, item.part == 0 ? from[row + 8] : 0};
  const int tokens = S::TOKENS == EIGHT ? EIGHT : uniform(item.tile.tokens.z);
  float sum[S::TOKENS / 2];
  multiply_item<S>(item.end - item.begin, tokens, ring, group, split, sum);
  if (!combine<S, S::TOKENS>(sum, sums, group, split) || !there) return;
  barrier_wait(grid_ready, 0);
#pragma unroll
  for (int n = 0; n < S::TOKENS / EIGHT; ++n) {
    if (n * EIGHT >= tokens) break;
    if (item.second) {
      store_part(l, item, row_tile, n * EIGHT, sum + n * 4, bias);
    } else {
      store_hidden(l, item.tile, row_tile, n * EIGHT, sum + n * 4, bias);
    }
  }
}

// Four warps of each group multiply, one thread loads weights, the other warps load activations.
template <class S>
constexpr int LAYER_THREADS = S::GROUPS * 128 + 32 + PRODUCER_WARPS<S> * 32;
template <class S>
constexpr int LAYER_SHARED = 1024 + S::STAGES * (S::X_BYTES + S::W_BYTES + 16) + S::SUM_BYTES;
constexpr int LAYER_STATIC = sizeof(Few) + sizeof(Queue) + 8 * QUEUE + 16, SMALL_SHARED = 99 << 10;

template <class S>
__global__ void __launch_bounds__(LAYER_THREADS<S>, S::BLOCKS) whole_layer(const __grid_constant__ Layer l) {
  static_assert(S::TOKENS % EIGHT == 0 && S::REGISTERS == 0);
  extern __shared__ uint8_t raw[];
  __shared__ Few few;
  __shared__ Queue queue;
  __shared__ uint64_t rows_full[S::STAGES], grid_ready, sorted;
  uint8_t* base = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  LayerRing<S> ring(base, rows_full);
  constexpr int COPIER = S::GROUPS * 128;  // the first thread that does not multiply
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.rows_full + 8 * i, PRODUCER_WARPS<S> * 32);
      barrier_init(ring.empty_bar(i), 4 * S::GROUPS);
    }
    barrier_init(shared_address(&grid_ready), 1);
    barrier_init(shared_address(&sorted), 32);
    queue.init();
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Routing& r = l.routing;
  const Tiles tiles = l.sorted ? Tiles{r.tiles, r.tile_count, r.token_of_row, r.row_of_pair}
                               : Tiles{few.tiles, &few.count, few.tokens, few.rows};
  const uint32_t ready = shared_address(&grid_ready);
  if (PRODUCER_WARPS<S> > 1 && threadIdx.x >= COPIER + 64) {
    const int first = uniform((threadIdx.x - COPIER - 32) / 32 * PRODUCER_ROWS<S>);
    barrier_wait(shared_address(&sorted), 0);
    load_activations<S>(l, tiles, ring, queue, first, [&] { barrier_wait(ready, 0); });
    return;
  }
  if (threadIdx.x >= COPIER + 32) {
    GridBarrier grid(l, ready);
    barrier_wait(shared_address(&sorted), 0);
    load_activations<S>(l, tiles, ring, queue, Zero(), [&] { grid.wait(); });
    grid.wait();
    return;
  }
  if (threadIdx.x >= COPIER) {
    if (!l.sorted) sort_into(r, few);
    __syncwarp();
    barrier_arrive(shared_address(&sorted));
    if (threadIdx.x == COPIER) Weights<S>(ring).load_all(l, queue, tiles, ready);
    return;
  }
  float* sums = reinterpret_cast<float*>(base + S::STAGES * (S::X_BYTES + S::W_BYTES + 16));
  for (int number = 0;; ++number) {
    barrier_wait(ring.full_bar(), ring.parity);
    const Item item = queue.items[number % QUEUE];
    if (item.end == 0) break;
    work<S>(l, ring, item, sums, ready);
  }
  barrier_wait(ready, 0);
  barrier_wait(shared_address(&sorted), 0);
  for (int unit = blockIdx.x * S::GROUPS + (threadIdx.x >> 7); unit < l.second.row_tiles * l.tokens;
       unit += gridDim.x * S::GROUPS)
    add_parts(l, tiles, unit % l.second.row_tiles, unit / l.second.row_tiles);
}

}  // namespace spark
