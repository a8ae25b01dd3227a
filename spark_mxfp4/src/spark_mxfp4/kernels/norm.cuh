// Adds a layer's input to the residual and normalises the sum by its root mean square (RMS norm), in one launch.
// Meanwhile the next kernel, a product, can load its weights. The kernel rounds as vLLM's definition does
// (vllm/ir/ops/layernorm.py): the sum is normalised in float32, rounded to bf16, multiplied by the weight and rounded
// again.
//
// With tensor parallelism each GPU has a part of the input, and the same launch is also the all-reduce. Each block
// stores its token's part in the other GPUs' inboxes and polls its own inbox for their parts. An inbox is a triple
// buffer of bf16 [token][buffer][rank][columns], all zeros at first. A zero word means "not arrived", so a sender
// replaces a pair of +0 by -0. Each launch uses the next of the three buffers and clears the buffer of the previous
// launch. Three buffers are enough: each launch needs the parts of all GPUs, so a GPU is at most one launch ahead of
// another. All parts are added in float32 in the order of the ranks, so that all GPUs get the same bits.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>

#include "arguments.cuh"
#include "overlap.cuh"
#include "peers.cuh"
#include "warp.cuh"

namespace spark {

constexpr int NORM_THREADS = 384, NORM_TURNS = 4;  // a thread has eight columns per turn

__device__ __forceinline__ float bf16_of_word(uint32_t word, int high) {
  return __uint_as_float(high ? word & 0xFFFF0000u : word << 16);
}
__device__ __forceinline__ uint32_t word_of(float x, float y) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&two);
}
union Eight {
  uint4 all;
  uint32_t words[4];
};

// One block per token.
template <bool REDUCES>
__global__ void __launch_bounds__(NORM_THREADS) add_and_normalise(const Norm n, const Peers p) {
  constexpr int WARPS = NORM_THREADS / 32;
  float* const shared = shared_floats();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_kernel_start();
  Eight weight[NORM_TURNS];
  float values[NORM_TURNS][8], squares = 0;
#pragma unroll
  for (int turn = 0; turn < NORM_TURNS; ++turn) {
    const int column = (turn * NORM_THREADS + threadIdx.x) * 8;
    if (column < n.columns) weight[turn].all = *reinterpret_cast<const uint4*>(n.weight + column);
  }
  wait_for_previous_kernel();
  const int buffer = REDUCES ? p.buffers[blockIdx.x] : 0;
  const auto message = [&](int box, int buffer, int sender, int column) {
    const int64_t row = (int64_t{blockIdx.x} * 3 + buffer) * p.ranks + sender;
    return reinterpret_cast<uint4*>(p.boxes[box]) + (row * n.columns + column) / 8;
  };
  const auto own_part = [&](int column) {
    Eight x;
    x.all = *reinterpret_cast<const uint4*>(n.x + int64_t{blockIdx.x} * n.columns + column);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (REDUCES && !x.words[i]) x.words[i] = 0x80008000u;
    return x;
  };
  if constexpr (REDUCES) {
    for (int column = threadIdx.x * 8; column < n.columns; column += NORM_THREADS * 8) {
      const Eight x = own_part(column);
      for (int rank = 0; rank < p.ranks; ++rank) {
        if (rank == p.rank) continue;
        send(message(rank, buffer, p.rank, column), x.all);
        *message(p.rank, (buffer + 2) % 3, rank, column) = uint4{};
      }
    }
  }
#pragma unroll
  for (int turn = 0; turn < NORM_TURNS; ++turn) {
    const int column = (turn * NORM_THREADS + threadIdx.x) * 8;
    if (column >= n.columns) continue;
    const int64_t at = int64_t{blockIdx.x} * n.columns + column;
    const Eight own = own_part(column);
    Eight residual;
    residual.all = *reinterpret_cast<const uint4*>(n.residual + at);
    for (int i = 0; i < 8; ++i) values[turn][i] = 0;
    for (int rank = 0; rank < (REDUCES ? p.ranks : 1); ++rank) {
      Eight part = own;
      if (REDUCES && rank != p.rank) part.all = receive(message(p.rank, buffer, rank, column));
#pragma unroll
      for (int i = 0; i < 8; ++i) values[turn][i] += bf16_of_word(part.words[i / 2], i % 2);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[turn][i] += bf16_of_word(residual.words[i / 2], i % 2);
      squares += values[turn][i] * values[turn][i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) residual.words[i] = word_of(values[turn][2 * i], values[turn][2 * i + 1]);
    *reinterpret_cast<uint4*>(n.sum + at) = residual.all;
  }
  for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  if (lane == 0) shared[warp] = squares;
  __syncthreads();
  if (REDUCES && threadIdx.x == 0) p.buffers[blockIdx.x] = (buffer + 1) % 3;  // all threads have read the old one
  squares = lane < WARPS ? shared[lane] : 0;
  for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  const float factor = rsqrtf(squares / n.columns + n.epsilon);
#pragma unroll
  for (int turn = 0; turn < NORM_TURNS; ++turn) {
    const int column = (turn * NORM_THREADS + threadIdx.x) * 8;
    if (column >= n.columns) continue;
    Eight output;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float two[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        two[j] = __bfloat162float(__float2bfloat16(values[turn][2 * i + j] * factor)) * bf16_of_word(weight[turn].words[i], j);
      output.words[i] = word_of(two[0], two[1]);
    }
    *reinterpret_cast<uint4*>(n.output + int64_t{blockIdx.x} * n.columns + column) = output.all;
  }
}

}  // namespace spark
