// The router for few tokens, in one launch: logits = x · Wᵀ + b, the top_k largest of each token, and their softmax.
//
// In the matrix instruction, the sixteen rows are tokens and the eight columns are experts. A warp takes units of 32
// columns of x and W. Of each unit a thread has eight columns (16 bytes) of one expert and of one or two tokens.
// Weights are loaded before the preceding kernel has ended. Sums are float32, in an order that depends only on the
// sizes; logits are rounded to bf16. Experts are chosen by the same operations as in vLLM's topk_softmax, so that a
// model generates the same tokens with both: softmax over all experts in float32, NaN and infinity count as 0, and of
// equal values the one with the lowest index wins.
#pragma once
#include "arguments.cuh"
#include "overlap.cuh"
#include "warp.cuh"

namespace spark {

constexpr int ROUTER_TOKENS = 16, ROUTER_EXPERTS = 256, ROUTER_TOP_K = 8;

// A warp's weights. `warps` warps share the columns; the warp with number `warp` has units warp, warp + warps, ...
template <int UNITS, int TILES>
struct Weights {
  uint4 values[UNITS][TILES];
  __device__ __forceinline__ void load(const Router& r, int first_expert, int warp, int warps, int lane) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int column = (warp + u * warps) * 32 + lane % 4 * 8, expert = first_expert + tile * 8 + lane / 4;
        values[u][tile] = uint4{};
        if (column < r.columns && expert < r.experts)
          values[u][tile] = *reinterpret_cast<const uint4*>(r.weight + int64_t{expert} * r.columns + column);
      }
  }
};

// Computes this warp's part of the sums. A thread has tokens g and g + 8 (g = lane / 4), experts 2 (lane % 4) and
// 2 (lane % 4) + 1. HALVES is 1 for up to eight tokens, else 2.
template <int HALVES, int UNITS, int TILES>
__device__ __forceinline__ void multiply(const Router& r, const Weights<UNITS, TILES>& w, int warp, int warps, int lane,
                                         float (&sum)[TILES][4]) {
  uint4 x[UNITS][2];
#pragma unroll
  for (int u = 0; u < UNITS; ++u)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (warp + u * warps) * 32 + lane % 4 * 8, token = half * 8 + lane / 4;
      x[u][half] = uint4{};
      if (half < HALVES && token < r.tokens && column < r.columns)
        x[u][half] = *reinterpret_cast<const uint4*>(r.x + token * r.x_stride + column);
    }
#pragma unroll
  for (int u = 0; u < UNITS; ++u)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const uint4 b = w.values[u][tile];
      multiply_add_8(sum[tile], x[u][0].x, x[u][1].x, x[u][0].y, x[u][1].y, b.x, b.y);
      multiply_add_8(sum[tile], x[u][0].z, x[u][1].z, x[u][0].w, x[u][1].w, b.z, b.w);
    }
}

// Stores this warp's part of the sums to shared memory, [WARPS][tokens: 8 HALVES][experts: 8 TILES], so that any thread
// can add the parts.
template <int HALVES, int TILES>
__device__ __forceinline__ void keep_part(float* parts, int warp, int lane, const float (&sum)[TILES][4]) {
  constexpr int WIDTH = 8 * TILES;
  float* mine = parts + warp * (HALVES * 8 * WIDTH);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float* to = mine + (half * 8 + lane / 4) * WIDTH + tile * 8 + lane % 4 * 2;
      to[0] = sum[tile][2 * half], to[1] = sum[tile][2 * half + 1];
    }
}

// Adds COUNT parts that are `stride` apart, in a fixed order. Four sums hide the latency of the additions.
template <int COUNT>
__device__ __forceinline__ float add_up(const float* part, int stride) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sums[i % 4] += part[i * stride];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16(value)); }

// Chooses the experts of one token. Called by a warp. `logit(e)` returns the logit of an expert e below r.experts. Lane
// l has experts 8 l to 8 l + 7. The number of lanes with experts is rounded up to a power of two; the other lanes
// repeat the same work.
template <class Logit>
__device__ __forceinline__ void choose(const Router& r, int token, Logit logit) {
  const int lane = threadIdx.x % 32;
  int lanes = 1;
  while (lanes * 8 < r.experts) lanes *= 2;
  const int first = lane % lanes * 8;
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = first + i < r.experts ? logit(first + i) : -INFINITY;
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) largest = fmaxf(largest, values[i]);
  for (int mask = lanes / 2; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = expf(values[i] - largest), sum += values[i];
  for (int mask = lanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  const float factor = 1.0f / sum;
  // Probabilities are not negative, so they can be compared by their bits. Key 0 means that the expert does not exist
  // or is already chosen.
  unsigned keys[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = values[i] * factor;
    keys[i] = first + i >= r.experts ? 0 : (isnan(value) || isinf(value)) ? 1 : __float_as_uint(value) + 1;
  }
  float total = 0, my_share = 0;
  int my_expert = 0;
  for (int j = 0; j < r.top_k; ++j) {
    unsigned best = keys[0];
    int at = 0;
#pragma unroll
    for (int i = 1; i < 8; ++i)
      if (keys[i] > best) best = keys[i], at = i;
    const unsigned winner = largest_of_warp(best);
    const int owner = __ffs(__ballot_sync(~0u, best == winner)) - 1;  // the lowest lane has the lowest experts
    const int place = __shfl_sync(~0u, at, owner), expert = owner * 8 + place;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (first + i == expert) keys[i] = 0;
    const float share = __uint_as_float(winner - 1);
    total += share;
    if (lane == j) my_share = share, my_expert = expert;
  }
  const float scale = 1.0f / (total > 0 ? total : 1.0f);
  const bool padding = r.padding != nullptr && r.padding[token] != 0;
  if (lane < r.top_k) {
    r.shares[token * r.top_k + lane] = padding ? 0 : my_share * scale;
    r.ids[token * r.top_k + lane] = padding ? -1 : my_expert;
  }
}

// One cluster of blocks. Block b computes 8 TILES experts, from 8 TILES b on, and chooses for tokens b, b + blocks, ...
// Logits are exchanged through distributed shared memory, so no global memory has to be reset after a launch.
template <int HALVES_, int UNITS_, int TILES_, int WARPS_>
struct OneCluster {
  static constexpr int HALVES = HALVES_, UNITS = UNITS_, TILES = TILES_, WARPS = WARPS_;
  static constexpr int OUTPUTS = HALVES * 8 * TILES * 8, LOGITS = ROUTER_TOKENS * ROUTER_EXPERTS;
  static constexpr int bytes(int blocks) {
    return 4 * (WARPS * OUTPUTS + (HALVES * 8 + blocks - 1) / blocks * ROUTER_EXPERTS);
  }
};

template <class V>
__global__ void __launch_bounds__(V::WARPS * 32, 1) route_by_cluster(const Router r) {
  constexpr int WIDTH = V::TILES * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, blocks = blocks_of_cluster();
  const int me = threadIdx.x;
  float* const parts = shared_floats();
  float* const logits = parts + V::WARPS * V::OUTPUTS;  // [turn][ROUTER_EXPERTS], for this block's tokens
  arrive_at_cluster();  // when all blocks have arrived, they run and their shared memory can be written
  let_next_kernel_start();
  Weights<V::UNITS, V::TILES> weights;
  weights.load(r, block * WIDTH, warp, V::WARPS, lane);
  const int token = me / WIDTH, expert = block * WIDTH + me % WIDTH;
  const bool adds = me < V::OUTPUTS && token < r.tokens && expert < r.experts;
  const float bias = adds && r.bias != nullptr ? __bfloat162float(r.bias[expert]) : 0;
  wait_for_previous_kernel();

  float sum[V::TILES][4] = {};
  multiply<V::HALVES>(r, weights, warp, V::WARPS, lane, sum);
  keep_part<V::HALVES>(parts, warp, lane, sum);
  __syncthreads();
  wait_for_cluster();
  if (adds)
    store_in_block(logits + token / blocks * ROUTER_EXPERTS + expert, token % blocks,
                   rounded(add_up<V::WARPS>(parts + me, V::OUTPUTS) + bias));
  __syncwarp();
  arrive_at_cluster();
  wait_for_cluster();
  for (int turn = warp; turn * blocks + block < r.tokens; turn += V::WARPS)
    choose(r, turn * blocks + block, [&](int e) { return logits[turn * ROUTER_EXPERTS + e]; });
}

// Many blocks (split-K): `slices` blocks share the columns of eight experts. The last block of the grid to finish adds
// the parts and chooses.
template <int HALVES_, int UNITS_, int WARPS_>
struct ByTicket {
  static constexpr int HALVES = HALVES_, UNITS = UNITS_, WARPS = WARPS_, OUTPUTS = HALVES * 64;
  static constexpr int bytes() { return 4 * (WARPS * OUTPUTS + 1); }
};

template <class V>
__global__ void __launch_bounds__(V::WARPS * 32, 1) route_by_ticket(const Router r, int slices) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, me = threadIdx.x;
  const int group = blockIdx.x / slices, slice = blockIdx.x % slices;
  float* const parts = shared_floats();
  int* const is_last = reinterpret_cast<int*>(parts + V::WARPS * V::OUTPUTS);
  let_next_kernel_start();
  Weights<V::UNITS, 1> weights;
  weights.load(r, group * 8, slice * V::WARPS + warp, slices * V::WARPS, lane);
  wait_for_previous_kernel();

  float sum[1][4] = {};
  multiply<V::HALVES>(r, weights, slice * V::WARPS + warp, slices * V::WARPS, lane, sum);
  keep_part<V::HALVES>(parts, warp, lane, sum);
  __syncthreads();
  const int token = me / 8, expert = group * 8 + me % 8;
  if (me < V::OUTPUTS && token < r.tokens && expert < r.experts)
    r.parts[(int64_t{slice} * r.tokens + token) * r.experts + expert] = add_up<V::WARPS>(parts + me, V::OUTPUTS);
  __threadfence();
  __syncthreads();
  if (me == 0) *is_last = atomicInc(r.ticket, gridDim.x - 1) == gridDim.x - 1;  // the last block resets it to 0
  __syncthreads();
  if (*is_last == 0) return;
  __threadfence();
  for (int t = warp; t < r.tokens; t += V::WARPS)
    choose(r, t, [&](int e) {
      float total = 0;
      for (int s = 0; s < slices; ++s) total += __ldcg(r.parts + (int64_t{s} * r.tokens + t) * r.experts + e);
      return rounded(total + (r.bias != nullptr ? __bfloat162float(r.bias[e]) : 0));
    });
}

}  // namespace spark
