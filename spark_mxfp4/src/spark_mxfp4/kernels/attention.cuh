// Attention for decoding, one new token per sequence, in one launch. The kernel rotates query and key, stores the new
// token in the paged KV cache, computes softmax with sinks over the cached tokens, and reduces over the thread blocks
// (splits) that share a sequence.
//
// A head has 64 dimensions. A key head has at most eight query heads; they are the columns of mma.m16n8k16. Keys and
// values are loaded from global memory to registers and used there, without shared memory. No copy in shared memory is
// needed, because a sum over dimensions can have any order and values are transposed in registers, as 8 x 8 tiles.
//
// In one step a warp processes 16 cached tokens. Before it computes, it loads the keys and values of its next step and
// the block numbers of the step after that. The cached tokens of its first step are loaded before the preceding kernel
// has ended, because earlier decoding steps stored them. Sums are float32, probabilities bf16, as in FlashAttention.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>

#include "arguments.cuh"
#include "instructions.cuh"
#include "overlap.cuh"
#include "warp.cuh"

namespace spark {

constexpr int ATTENTION_GROUP = 8, ATTENTION_WIDTH = 64;  // most query heads per key head, dimensions of a head
constexpr int ATTENTION_ROWS = 16;                        // cached tokens of a warp's step
// Number of floats in a partial result: sums [8 heads][64], maxima [8], totals [8].
constexpr int ATTENTION_PART = ATTENTION_GROUP * (ATTENTION_WIDTH + 2);
constexpr float LOG2_E = 1.4426950408889634f;

struct Pair {
  uint4 low, high;  // dimensions 8 c to 8 c + 7, and the same + 32, where c = lane % 4
};

__device__ __forceinline__ Pair load_pair(const __nv_bfloat16* head, int c) {
  return {*reinterpret_cast<const uint4*>(head + 8 * c), *reinterpret_cast<const uint4*>(head + 32 + 8 * c)};
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* head, int c, const Pair& pair) {
  *reinterpret_cast<uint4*>(head + 8 * c) = pair.low, *reinterpret_cast<uint4*>(head + 32 + 8 * c) = pair.high;
}
__device__ __forceinline__ uint32_t two_bf16(float x, float y) {
  __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<uint32_t*>(&two);
}

// Rotary embedding in Neox style: dimensions d and d + 32 rotate together. Cosine and sine are rounded to bf16, as in
// vLLM for a bf16 model.
__device__ __forceinline__ void rotate_word(uint32_t& low, uint32_t& high, const float* cosines) {
  float results[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float x = __uint_as_float(i ? low & 0xFFFF0000u : low << 16);
    const float y = __uint_as_float(i ? high & 0xFFFF0000u : high << 16);
    const float cosine = __bfloat162float(__float2bfloat16(cosines[i]));
    const float sine = __bfloat162float(__float2bfloat16(cosines[32 + i]));
    results[0][i] = x * cosine - y * sine, results[1][i] = y * cosine + x * sine;
  }
  low = two_bf16(results[0][0], results[0][1]), high = two_bf16(results[1][0], results[1][1]);
}
__device__ __forceinline__ void rotate(Pair& pair, const float* rotation, int position, int c) {
  const float* cosines = rotation + int64_t{position} * ATTENTION_WIDTH + 8 * c;
  rotate_word(pair.low.x, pair.high.x, cosines), rotate_word(pair.low.y, pair.high.y, cosines + 2);
  rotate_word(pair.low.z, pair.high.z, cosines + 4), rotate_word(pair.low.w, pair.high.w, cosines + 6);
}

// Keys and values of 16 cached tokens from `first` on. A thread holds parts of tokens g and g + 8, where g = lane / 4.
// Tokens from `end` on are zeros.
struct CachedRows {
  Pair key[2], value[2];
  __device__ __forceinline__ void load(const Attention& a, const __nv_bfloat16* cache, const int32_t (&blocks)[2],
                                       int first, int end, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first + half * 8 + lane / 4, c = lane % 4;
      key[half] = value[half] = Pair{};
      if (position < end) {
        const __nv_bfloat16* token = cache + blocks[half] * a.cache_block + position % a.block_size * a.cache_token;
        key[half] = load_pair(token, c), value[half] = load_pair(token + ATTENTION_WIDTH, c);
      }
    }
  }
};
// Loads the numbers of the cache blocks that hold tokens g and g + 8.
__device__ __forceinline__ void load_blocks(int32_t (&blocks)[2], const int32_t* table, int block_size, int first, int end,
                                            int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = first + half * 8 + lane / 4;
    if (position < end) blocks[half] = table[position / block_size];
  }
}

// Running softmax of query heads 2 c and 2 c + 1 over the tokens that a warp has processed: maximum, total of the
// probabilities, and the sums of values. A thread's sums are four tiles of the matrix instruction's result.
struct HeadSums {
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {}, sums[4][4] = {};

  // Adds 16 tokens. Positions from `end` on get the probability 0.
  __device__ __forceinline__ void add(const CachedRows& rows, const Pair& query, int first, int end, float scale, int lane) {
    const Pair &k0 = rows.key[0], &k1 = rows.key[1], &v0 = rows.value[0], &v1 = rows.value[1];
    float scores[4] = {};
    multiply_add_8(scores, k0.low.x, k1.low.x, k0.low.y, k1.low.y, query.low.x, query.low.y);
    multiply_add_8(scores, k0.low.z, k1.low.z, k0.low.w, k1.low.w, query.low.z, query.low.w);
    multiply_add_8(scores, k0.high.x, k1.high.x, k0.high.y, k1.high.y, query.high.x, query.high.y);
    multiply_add_8(scores, k0.high.z, k1.high.z, k0.high.w, k1.high.w, query.high.z, query.high.w);
    float factor[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = first + i / 2 * 8 + lane / 4 < end ? scores[i] * scale : -INFINITY;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float now = fmaxf(scores[head], scores[2 + head]);
      for (int mask = 4; mask < 32; mask *= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, mask));
      now = fmaxf(now, largest[head]);
      factor[head] = exp2f(largest[head] - now), largest[head] = now;
      scores[head] = exp2f(scores[head] - now), scores[2 + head] = exp2f(scores[2 + head] - now);
      total[head] = total[head] * factor[head] + scores[head] + scores[2 + head];
    }
    const uint32_t upper = transpose_8x8(two_bf16(scores[0], scores[1]));
    const uint32_t lower = transpose_8x8(two_bf16(scores[2], scores[3]));
    const uint32_t words[2][8] = {
        {v0.low.x, v0.low.y, v0.low.z, v0.low.w, v0.high.x, v0.high.y, v0.high.z, v0.high.w},
        {v1.low.x, v1.low.y, v1.low.z, v1.low.w, v1.high.x, v1.high.y, v1.high.z, v1.high.w}};
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][i] *= factor[i % 2];
      multiply_add_8(sums[tile], transpose_8x8(words[0][2 * tile]), transpose_8x8(words[0][2 * tile + 1]),
                     transpose_8x8(words[1][2 * tile]), transpose_8x8(words[1][2 * tile + 1]), upper, lower);
    }
  }

  // Writes the warp's partial result to shared memory.
  __device__ __forceinline__ void store(float* part, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int head = 0; head < 2; ++head)
      for (int mask = 4; mask < 32; mask *= 2) total[head] += __shfl_xor_sync(~0u, total[head], mask);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // After the transposition, row g of word w is dimension 8 (g / 2) + 2 (w % 4) + g % 2 of the low half of the
        // dimensions if w < 4, else of the high half.
        const int word = 2 * tile + i / 2, dimension = word / 4 * 32 + 8 * (g / 2) + 2 * (word % 4) + g % 2;
        part[(2 * c + i % 2) * ATTENTION_WIDTH + dimension] = sums[tile][i];
      }
    if (g == 0)
#pragma unroll
      for (int head = 0; head < 2; ++head) {
        part[ATTENTION_GROUP * ATTENTION_WIDTH + 2 * c + head] = largest[head];
        part[ATTENTION_GROUP * (ATTENTION_WIDTH + 1) + 2 * c + head] = total[head];
      }
  }
};

struct HeadSum {
  float sum, largest, total;
};
// Reduces `count` partial results for one dimension of one head. The maximum of a result without tokens is -INFINITY.
template <class Load>
__device__ __forceinline__ HeadSum add_parts(int count, int head, int dimension, Load load) {
  HeadSum all{0, -INFINITY, 0};
#pragma unroll 4
  for (int i = 0; i < count; ++i) all.largest = fmaxf(all.largest, load(i, ATTENTION_GROUP * ATTENTION_WIDTH + head));
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const float factor = exp2f(load(i, ATTENTION_GROUP * ATTENTION_WIDTH + head) - all.largest);
    all.sum += factor * load(i, head * ATTENTION_WIDTH + dimension);
    all.total += factor * load(i, ATTENTION_GROUP * (ATTENTION_WIDTH + 1) + head);
  }
  return all;
}

// Grid: x is the split, y is sequence · key heads + key head. WARPS is 8 if eight warps cover the window in one step,
// else 16.
template <int WARPS>
constexpr int ATTENTION_BYTES = 4 * (WARPS * ATTENTION_PART + 1);
template <int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 16 / WARPS) attend(const Attention a) {
  constexpr int THREADS = WARPS * 32, STRIDE = WARPS * ATTENTION_ROWS;
  const int outputs = a.group * ATTENTION_WIDTH;
  const int split = blockIdx.x, token = blockIdx.y / a.key_heads, head = blockIdx.y % a.key_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  float* const parts = shared_floats();
  int* const is_last = reinterpret_cast<int*>(parts + WARPS * ATTENTION_PART);
  let_next_kernel_start();

  const int length = a.lengths[token], begin = a.window > 0 && length > a.window ? length - a.window : 0;
  const int steps = (length - begin + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
  const int spread = (steps + a.splits - 1) / a.splits, mine = spread > a.least ? spread : a.least;
  const int active = (steps + mine - 1) / mine;  // splits with at least one step
  __nv_bfloat16* const output = a.output + (int64_t{token} * a.key_heads + head) * outputs;
  if (split >= active) {
    if (length > 0 || split > 0) return;
    wait_for_previous_kernel();
    for (int i = threadIdx.x; i < outputs; i += THREADS) output[i] = __float2bfloat16(0);
    return;
  }
  const int first = begin + split * mine * ATTENTION_ROWS, stop = first + mine * ATTENTION_ROWS;
  const int end = stop < length ? stop : length, newest = length - 1, cached = end < newest ? end : newest;
  __nv_bfloat16* const cache = a.cache + head * a.cache_head;
  const int32_t* const table = a.table + token * a.table_stride;
  int at = first + warp * ATTENTION_ROWS;
  CachedRows rows, next;
  int32_t blocks[2];
  load_blocks(blocks, table, a.block_size, at, cached, lane);
  rows.load(a, cache, blocks, at, cached, lane);
  load_blocks(blocks, table, a.block_size, at + STRIDE, cached, lane);
  wait_for_previous_kernel();

  Pair query{};
  if (g < a.group) query = load_pair(a.query + token * a.query_stride + (head * a.group + g) * ATTENTION_WIDTH, c);
  if (a.rotation != nullptr) rotate(query, a.rotation, newest, c);
  HeadSums sums;
  for (; at < end; at += STRIDE, rows = next) {
    next.load(a, cache, blocks, at + STRIDE, cached, lane);
    load_blocks(blocks, table, a.block_size, at + 2 * STRIDE, cached, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (at + half * 8 + g == newest) {
        Pair key = load_pair(a.key + token * a.key_stride + head * ATTENTION_WIDTH, c);
        if (a.rotation != nullptr) rotate(key, a.rotation, newest, c);
        rows.key[half] = key, rows.value[half] = load_pair(a.value + token * a.value_stride + head * ATTENTION_WIDTH, c);
        const int64_t slot = a.slots[token];
        if (slot >= 0) {
          __nv_bfloat16* const to = cache + slot / a.block_size * a.cache_block + slot % a.block_size * a.cache_token;
          store_pair(to, c, key), store_pair(to + ATTENTION_WIDTH, c, rows.value[half]);
        }
      }
    __syncwarp();
    sums.add(rows, query, at, end, a.scale * LOG2_E, lane);
  }
  sums.store(parts + warp * ATTENTION_PART, lane);
  __syncthreads();

  const int steps_here = (end - first + ATTENTION_ROWS - 1) / ATTENTION_ROWS, busy = steps_here < WARPS ? steps_here : WARPS;
  float* const shared_part = a.parts + ((int64_t{token} * a.key_heads + head) * a.splits) * ATTENTION_PART;
  const auto finish = [&](const HeadSum& all, int i) {
    const int query_head = head * a.group + i / ATTENTION_WIDTH;
    float total = all.total, factor = 1;
    if (a.sinks != nullptr) {
      const float sink = __bfloat162float(a.sinks[query_head]) * LOG2_E, largest = fmaxf(all.largest, sink);
      factor = exp2f(all.largest - largest), total = total * factor + exp2f(sink - largest);
    }
    output[i] = __float2bfloat16(all.sum * factor / total);
  };
  for (int i = threadIdx.x; i < outputs; i += THREADS) {
    const HeadSum all = add_parts(busy, i / ATTENTION_WIDTH, i % ATTENTION_WIDTH,
                                  [&](int w, int place) { return parts[w * ATTENTION_PART + place]; });
    if (active == 1) {
      finish(all, i);
    } else {
      float* const mine_of_all = shared_part + split * ATTENTION_PART;
      mine_of_all[i] = all.sum;
      if (i % ATTENTION_WIDTH == 0) {
        mine_of_all[ATTENTION_GROUP * ATTENTION_WIDTH + i / ATTENTION_WIDTH] = all.largest;
        mine_of_all[ATTENTION_GROUP * (ATTENTION_WIDTH + 1) + i / ATTENTION_WIDTH] = all.total;
      }
    }
  }
  if (active == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)  // the counter wraps to 0 in the last block
    *is_last = atomicInc(a.tickets + blockIdx.y, active - 1) == unsigned(active - 1);
  __syncthreads();
  if (*is_last == 0) return;
  __threadfence();
  for (int i = threadIdx.x; i < outputs; i += THREADS)
    finish(add_parts(active, i / ATTENTION_WIDTH, i % ATTENTION_WIDTH,
                     [&](int s, int place) { return __ldcg(shared_part + s * ATTENTION_PART + place); }),
           i);
}

// For tokens of prompts, one block per token: rotates the query, and stores the rotated key and the value in the cache.
__global__ void __launch_bounds__(256) rotate_and_store(const Rotation r) {
  const int token = blockIdx.x;
  let_next_kernel_start();
  int low = 0, high = r.sequences;  // binary search for the token's sequence: the last with start <= token
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (r.starts[middle] <= token ? low : high) = middle;
  }
  const int position = r.lengths[low] - (r.starts[low + 1] - token);
  const int64_t slot = r.slots[token];
  wait_for_previous_kernel();
  const int heads = r.query_heads + r.key_heads;
  for (int i = threadIdx.x; i < heads * 4; i += blockDim.x) {
    const int head = i / 4, c = i % 4, key_head = head - r.query_heads;
    if (key_head < 0) {
      Pair pair = load_pair(r.query + token * r.query_stride + head * ATTENTION_WIDTH, c);
      rotate(pair, r.rotation, position, c);
      store_pair(r.output + (int64_t{token} * r.query_heads + head) * ATTENTION_WIDTH, c, pair);
    } else if (slot >= 0) {
      Pair pair = load_pair(r.key + token * r.key_stride + key_head * ATTENTION_WIDTH, c);
      rotate(pair, r.rotation, position, c);
      __nv_bfloat16* const to = r.cache + slot / r.block_size * r.cache_block + key_head * r.cache_head +
                                slot % r.block_size * r.cache_token;
      store_pair(to, c, pair);
      store_pair(to + ATTENTION_WIDTH, c, load_pair(r.value + token * r.value_stride + key_head * ATTENTION_WIDTH, c));
    }
  }
}

}  // namespace spark
