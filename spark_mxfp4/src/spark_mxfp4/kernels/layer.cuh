// A persistent kernel that computes a whole layer for few tokens in one launch: both products and the weighted sum.
// It loads weights without a pause between the products.
//
// A work item is ROW_GROUPS groups of 64 weight rows by up to TOKENS tokens of one expert. It covers all columns in the
// first product, and one of `parts` parts of the columns in the second (split-K). Blocks take items from a shared
// counter; all items of the first product come before those of the second. In each block, one producer thread loads
// weights into a ring buffer and waits only for free stages. One producer warp for every 8 or 16 tokens loads
// activations. Each block sorts up to 32 pairs itself, so that no sorting kernel has to run first.
//
// The kernel uses bulk copies, mbarriers, mma.sync and a cooperative launch. It uses no clusters, no wgmma and no
// setmaxnreg, so the same source is compiled for compute capability 9.0 and 12.1.
//
// Blocks exchange results through global memory, without flags. Each word of this memory holds the sentinel MISSING,
// which is never a result, until a block stores the result there. Other blocks poll the word. Parts are stored as
// float32 and added at the end in a fixed order, so the sum does not depend on which block computed which part. The
// launch is cooperative because blocks wait for each other.
#pragma once
#include "layer_load.cuh"
#include "overlap.cuh"

namespace spark {

// Calls `use` with shape `number` and returns its result. Returns `none` if there is no such shape.
template <class Use, class Result>
Result with_shape(int number, Use use, Result none) {
#define SPARK_CASE(number, ...) case number: return use(Shape<__VA_ARGS__>());
  switch (number) {
    SPARK_SMALL_LAYERS(SPARK_CASE)
#ifndef SPARK_SMALL
    SPARK_LARGE_LAYERS(SPARK_CASE)
#endif
    default: return none;
  }
#undef SPARK_CASE
}

// Multiplies one item and moves the ring past the item's last stage. A warp computes 16 rows; `sum` gets this thread's
// sums, four for every 8 tokens.
template <class S>
__device__ __forceinline__ void multiply_item(int chunks, int tokens, LayerRing<S>& ring, int group, int split,
                                              float (&sum)[S::TOKENS / 2]) {
  constexpr int EIGHTS = S::TOKENS / EIGHT;
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, token = lane / 4, half = (token & 1) * 64;
  const int first_part = split * S::STEP;
  // This thread's addresses in the ring's first stage.
  const uint32_t values = shared_address(ring.w) + (group * S::CHUNKS + first_part) * CHUNK_BYTES + 16 * thread;
  const uint32_t scales = values - 16 * thread + VALUE_BYTES + 2 * (thread >> 1);
  const uint32_t x = ring.x + (first_part * S::TOKENS + token) * PLANE_BYTES + (lane & 3) * 16 + half;
  // With 8 tokens, two sets of accumulators alternate, so that no matrix instruction waits for the preceding one.
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
    if constexpr (EIGHTS == 1) {  // expand the weights of one step at a time, to use fewer registers
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
      // Two groups of tokens at a time, because matrix instructions with the same accumulators wait for each other.
#pragma unroll
      for (int n = 0; n < EIGHTS; n += 2) {
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

// Adds the sums of the warpgroups that share rows, always in the same order. Returns true in the warpgroup that holds
// the result.
template <class S>
__device__ __forceinline__ bool combine(float (&sum)[S::TOKENS / 2], float* sums, int group, int split) {
  if constexpr (S::SPLIT > 1) {
    float* shared = sums + group * (S::SPLIT - 1) * S::TOKENS * 64 + (threadIdx.x & 127);
    if (split > 0) {
#pragma unroll
      for (int i = 0; i < S::TOKENS / 2; ++i) shared[((split - 1) * S::TOKENS / 2 + i) * 128] = sum[i];
    }
    named_barrier(1 + group, S::SPLIT * 128);
    if (split == 0) {
      for (int other = 0; other < S::SPLIT - 1; ++other) {
#pragma unroll
        for (int i = 0; i < S::TOKENS / 2; ++i) sum[i] += shared[(other * S::TOKENS / 2 + i) * 128];
      }
    }
    named_barrier(1 + group, S::SPLIT * 128);
  }
  return split == 0;
}

// Like store_swiglu of gemm.cuh, for 8 tokens from `first` on. The result is not in planes: a token's columns are
// contiguous.
__device__ __forceinline__ void store_hidden(const Layer& l, const Tile& tile, int row_tile, int first, const float* sum,
                                             const float (&bias)[2]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, token = first + lane / 4;
  const float low = activation(sum[0] + bias[0], sum[2] + bias[1], l.first);
  const float high = activation(sum[1] + bias[0], sum[3] + bias[1], l.first);
  const uint32_t pair = transpose_8x8(pack(low, high));
  auto* to = reinterpret_cast<uint32_t*>(l.first.out) + (tile.tokens.y + token) * (l.hidden.stride / 4);
  const int vector = (row_tile & 1) * 4 + warp;  // one of a chunk's eight, see layout.py
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

// Adds all parts of 64 columns of a token's result. A warpgroup adds eight parts at once; a thread has four columns.
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
  if (!combine<S>(sum, sums, group, split) || !there) return;
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

// A block has GROUPS consumer warpgroups, one warp that sorts pairs (its first thread also loads weights), and
// PRODUCER_WARPS warps that load activations.
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
  constexpr int COPIER = S::GROUPS * 128;  // the first thread after the consumers
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
