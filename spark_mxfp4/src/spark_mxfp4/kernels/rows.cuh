// The kernels before and after the two products. sort_pairs sorts the pairs of token and expert, and can reorder the
// columns of activations for the first product. write_planes writes reordered activations to planes. reduce adds the
// results of a token's experts.
#pragma once
#include "overlap.cuh"
#include "routing.cuh"
#include "warp.cuh"

namespace spark {

constexpr int ROUTE_THREADS = 1024;
constexpr int ROUTE_WARPS = ROUTE_THREADS / 32;

// Inclusive prefix sum over the threads of the block. All threads of the block must call it.
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

// Calls `each(pair, expert)` for pair, pair + 32, ..., with eight loads in flight. All lanes of the warp make the same
// number of calls. A pair at or past `end` gets expert -1.
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

// Reorders the columns of a token's chunk (see pair_at). Of eight lanes, lane v holds vector v in the order of the
// columns and returns vector v of the new order: words 0 and 2 (v even) or 1 and 3 (v odd) of lanes v/2 and v/2 + 4.
// All lanes of a warp must call this function.
__device__ __forceinline__ uint4 in_order(const uint4& mine) {
  const int vector = threadIdx.x & 7, low = (threadIdx.x & 24) + vector / 2, high = low + 4;
  const auto word = [&](int lane, uint32_t even, uint32_t odd) {
    const uint32_t a = __shfl_sync(~0u, even, lane), b = __shfl_sync(~0u, odd, lane);
    return vector & 1 ? b : a;
  };
  return {word(low, mine.x, mine.y), word(low, mine.z, mine.w), word(high, mine.x, mine.y), word(high, mine.z, mine.w)};
}

// Reorders the columns of all tokens. `blocks` blocks divide the tokens among them; this one is number `block`.
__device__ __forceinline__ void order_columns(const Ordering& o, int block, int blocks) {
  constexpr int AT_ONCE = 4;
  const int width = o.chunks * 8, share = (o.tokens + blocks - 1) / blocks, first = block * share;
  const int end = max(0, min(share, o.tokens - first)) * width;
  for (int i = threadIdx.x; __any_sync(~0u, i < end); i += AT_ONCE * ROUTE_THREADS) {
    uint4 vectors[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const int at = i + u * ROUTE_THREADS, token = first + at / width, vector = at % width;
      vectors[u] = at < end && vector < o.vectors ? o.x[int64_t{token} * o.vectors + vector] : uint4{};
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const int at = i + u * ROUTE_THREADS;
      vectors[u] = in_order(vectors[u]);
      if (at < end) o.ordered[int64_t{first} * width + at] = vectors[u];
    }
  }
}

// Copies a token's activations to its experts' rows of the planes [chunks][rows][8 vectors], reordered and swizzled.
__global__ void write_planes(Ordering o, const int32_t* row_of_pair, int top_k, int64_t rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int token = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x, width = o.chunks * 8;
  const uint4 ordered = in_order(i < o.vectors ? o.x[int64_t{token} * o.vectors + i] : uint4{});
  for (int j = 0; i < width && j < top_k; ++j) {
    const int row = row_of_pair[token * top_k + j];
    if (row >= 0) o.ordered[(i / 8 * rows + row) * 8 + ((i ^ row) & 7)] = ordered;
  }
}

// The first cluster of blocks sorts all pairs by expert; within an expert they stay in the order of the tokens. The
// other clusters reorder columns.
__global__ void __launch_bounds__(ROUTE_THREADS) sort_pairs(Routing r, Ordering o) {
  int* counts = reinterpret_cast<int*>(shared_floats());  // [ROUTE_WARPS][experts]
  int *scratch = counts + ROUTE_WARPS * r.experts, *totals = scratch + ROUTE_WARPS;  // [ROUTE_WARPS], [blocks][experts]
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, me = threadIdx.x;
  const int block = blockIdx.x, blocks = blocks_of_cluster();
  if (block >= blocks) return order_columns(o, block - blocks, gridDim.x - blocks);
  arrive_at_cluster();  // when all blocks have arrived, they run and their shared memory can be written
  const int all_warps = blocks * ROUTE_WARPS, share = (r.pairs + all_warps * 32 - 1) / (all_warps * 32) * 32;
  const int first = block * ROUTE_WARPS * share, begin = first + warp * share, end = min(begin + share, r.pairs);
  const int warps = max(0, min(ROUTE_WARPS, (r.pairs - first + share - 1) / share));  // warps that have pairs
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
    if (pair < end) r.row_of_pair[pair] = earlier + before;  // for now, its place among this warp's pairs of the expert
  });
  __syncthreads();
  int tokens = 0, earlier = 0;  // tokens of this thread's expert: in this block, later in all; in earlier blocks
  if (me < r.experts) {
    for (int w = 0; w < warps; ++w) {
      const int here = counts[w * r.experts + me];
      counts[w * r.experts + me] = tokens;
      tokens += here;
    }
  }
  wait_for_cluster();
  if (me < r.experts) {
    for (int other = 0; other < blocks; ++other) store_in_block(totals + block * r.experts + me, other, tokens);
  }
  arrive_at_cluster();
  wait_for_cluster();
  tokens = 0;
  for (int other = 0; me < r.experts && other < blocks; ++other) {
    if (other == block) earlier = tokens;
    tokens += totals[other * r.experts + me];
  }
  const int padded = padded_rows(r, tokens);
  const int tile_number = (tokens + r.tile_tokens - 1) / r.tile_tokens;
  const int first_row = block_sum(padded, scratch) - padded;
  const int last_tile = block_sum(tile_number, scratch);
  if (me < r.experts) {
    for (int w = 0; w < warps; ++w) counts[w * r.experts + me] += first_row + earlier;
  }
  if (block == 0) {
    if (me == r.experts - 1) *r.tile_count = last_tile;
    // The tiles of an expert are about equal: if tiles have up to 256 tokens, 260 tokens are tiles of 136 and 124, not
    // of 256 and 4.
    const int size = tile_number > 0 ? ((tokens + tile_number - 1) / tile_number + 7) & ~7 : 0;
    for (int i = 0; i < tile_number; ++i)
      r.tiles[last_tile - tile_number + i] = make_int4(me, first_row + i * size, min(size, tokens - i * size), 0);
  }
  __syncthreads();
  for_each_pair(r, begin + lane, end, [&](int pair, int expert) {
    if (pair >= end) return;
    const int row = expert >= 0 ? mine[expert] + r.row_of_pair[pair] : -1;
    r.row_of_pair[pair] = row;
    if (row >= 0) r.token_of_row[row] = pair / r.top_k;
  });
}

// result[t] = sum over j of shares[t, j] * output[row of pair (t, j)], always in the order of j, so that every run
// gives the same bits. A thread takes one vector of each of TOKENS tokens and loads AT_ONCE experts at a time, so that
// enough loads are in flight.
template <int TOKENS, int AT_ONCE>
__global__ void reduce(const uint4* output, const int32_t* row_of_pair, const float* shares, uint4* result, int tokens,
                       int top_k, int vectors) {
  const int token = blockIdx.x * TOKENS, vector = blockIdx.y * blockDim.x + threadIdx.x;
  float sum[TOKENS][8] = {};
  for (int first = 0; first < top_k; first += AT_ONCE) {
    int rows[TOKENS][AT_ONCE];  // written two kernels ago, so readable before the preceding kernel has ended
    float factors[TOKENS][AT_ONCE];
    uint4 bits[TOKENS][AT_ONCE];
    const auto each = [&](auto use) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) use(t, j, (token + t) * top_k + first + j);
    };
    each([&](int t, int j, int pair) {
      const bool there = first + j < top_k && token + t < tokens;
      rows[t][j] = there ? row_of_pair[pair] : -1;
      factors[t][j] = there ? shares[pair] : 0;
    });
    if (first == 0) wait_for_previous_kernel();
    each([&](int t, int j, int) {
      if (rows[t][j] >= 0 && vector < vectors) bits[t][j] = output[int64_t{rows[t][j]} * vectors + vector];
    });
    each([&](int t, int j, int) {
      if (rows[t][j] < 0) return;
      const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits[t][j]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = __bfloat1622float2(pairs[i]);
        sum[t][2 * i] += factors[t][j] * two.x;
        sum[t][2 * i + 1] += factors[t][j] * two.y;
      }
    });
  }
  let_next_kernel_start();
  if (vector >= vectors) return;
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    if (token + t >= tokens) break;
    uint4 total;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&total);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(sum[t][2 * i], sum[t][2 * i + 1]);
    result[int64_t{token + t} * vectors + vector] = total;
  }
}

}  // namespace spark
