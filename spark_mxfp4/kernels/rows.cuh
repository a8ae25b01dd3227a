// The kernels around the two products: sort, bring activations into rows, add up a token's experts.
#pragma once
#include <cuda_bf16.h>

#include "routing.cuh"

namespace spark {

struct Gather {
  const uint32_t* x;  // [tokens][pairs]: two columns each
  uint4* sorted;      // planes, or rows of `vectors`
  int pairs, vectors;
  int64_t rows;
  int as_they_are;    // rows, not planes
};

__device__ __forceinline__ void bring_row(const Gather& g, int token, int row, int lane, int lanes) {
  const uint32_t* from = g.x + int64_t{token} * g.pairs;
  if (g.as_they_are) {
    copy_row_as_it_is(from, g.sorted, row, g.pairs, g.vectors, lane, lanes);
  } else {
    copy_row(from, g.sorted, row, g.pairs, g.vectors, g.rows, lane, lanes);
  }
}

// Few pairs: every block sorts all of them again, which is cheaper than another launch, and copies its own rows.
__global__ void __launch_bounds__(ROUTE_THREADS) route_and_gather(Routing r, Gather g) {
  extern __shared__ int memory[];
  int *counts = memory, *scratch = counts + ROUTE_WARPS * r.experts, *row_of_pair = scratch + ROUTE_WARPS;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const bool writer = blockIdx.x == 0;
  if (threadIdx.x < 32) {
    Sorted s;
    const bool few = sort_few(r, s);
    if (threadIdx.x == 0) scratch[0] = few;
    if (few) {
      const int tiles = __popc(__ballot_sync(~0u, s.first)), lane = threadIdx.x;
      if (lane < r.pairs) row_of_pair[lane] = s.expert < 0 ? -1 : s.first_row + s.place;
      if (writer && s.first) r.tiles[s.tile] = make_int4(s.expert, s.first_row, s.tokens, 0);
      if (writer && lane == 0) *r.tile_count = tiles;
    }
  }
  __syncthreads();
  const bool few = scratch[0] != 0;
  __syncthreads();
  if (!few) route(r, counts, scratch, row_of_pair, writer);
  __syncthreads();
  if (writer) {
    for (int pair = threadIdx.x; pair < r.pairs; pair += ROUTE_THREADS) r.row_of_pair[pair] = row_of_pair[pair];
  }
  // Groups of 256 threads take one row each.
  const int group = threadIdx.x / 256, groups = ROUTE_THREADS / 256;
  for (int pair = blockIdx.x * groups + group; pair < r.pairs; pair += gridDim.x * groups) {
    const int row = row_of_pair[pair];
    if (row >= 0) bring_row(g, pair / r.top_k, row, threadIdx.x % 256, 256);
  }
}

__global__ void __launch_bounds__(ROUTE_THREADS) route_only(Routing r) {
  extern __shared__ int memory[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  route(r, memory, memory + ROUTE_WARPS * r.experts, r.row_of_pair, true);
}

__global__ void gather(const int32_t* row_of_pair, int top_k, Gather g) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int row = row_of_pair[blockIdx.x];
  if (row >= 0) bring_row(g, blockIdx.x / top_k, row, threadIdx.x, blockDim.x);
}

// result[t] = sum over j of share[t, j] * output[row of pair (t, j)], in the order of j: equal on every run.
__global__ void reduce(const uint4* output, const int32_t* row_of_pair, const float* shares, uint4* result, int top_k,
                       int vectors) {
  constexpr int AT_ONCE = 4;
  const int token = blockIdx.x, vector = blockIdx.y * blockDim.x + threadIdx.x;
  float sum[8] = {};
  for (int first = 0; first < top_k; first += AT_ONCE) {
    int rows[AT_ONCE];  // written two kernels ago, so they may be read before the last one has ended
    float factors[AT_ONCE];
    uint4 bits[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const bool there = first + j < top_k;
      rows[j] = there ? row_of_pair[token * top_k + first + j] : -1;
      factors[j] = there ? shares[token * top_k + first + j] : 0;
    }
    if (first == 0) wait_for_previous_kernel();
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (rows[j] >= 0 && vector < vectors) bits[j] = output[int64_t{rows[j]} * vectors + vector];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      if (rows[j] < 0) continue;
      const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits[j]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = __bfloat1622float2(pairs[i]);
        sum[2 * i] += factors[j] * two.x;
        sum[2 * i + 1] += factors[j] * two.y;
      }
    }
  }
  let_next_kernel_start();
  if (vector >= vectors) return;
  uint4 total;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&total);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
  result[int64_t{token} * vectors + vector] = total;
}

}  // namespace spark
