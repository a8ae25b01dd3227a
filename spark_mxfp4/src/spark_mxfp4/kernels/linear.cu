// Dense products of 4-bit or 8-bit weights and few tokens, at the speed of memory: out[m][n] = Σ x[m][k] · w[n][k].
//
// In the variants Columns a thread block computes tiles of 16 rows one after another. Its warps share the columns of a
// tile, CPW chunks of 64 each, and keep their part of the activations in registers. Each warp has its own ring buffer
// of DEPTH tiles, which it fills (cp.async) with the weights that it expands, so only the final sum over the warps
// needs a barrier of the block. The variants Rows, for many rows, are described below.
//
// Expanded weights are the left operand of mma.m16n8k16. The first tiles are loaded before the preceding kernel has
// ended, because weights do not depend on it. All instructions exist on compute capability 9.0 and 12.1, so both use
// the same source. Sums are float32, in an order that depends only on the variant.
#ifdef __CUDACC__
#include <cuda_runtime.h>

#include "overlap.cuh"
#else
#include "linear_on_cpu.h"  // the tests' stand-in for the GPU's instructions
#endif
#include "arguments.cuh"
#include "launch.cuh"

namespace spark {

enum Format { MXFP4 = 0, MXFP8 = 1, FP8 = 2 };

template <int FORMAT>
struct Chunk {  // 16 rows by 64 columns
  static constexpr int VECTORS = FORMAT == MXFP4 ? 1 : 2;  // 16-byte vectors per thread
  static constexpr int SCALES = FORMAT == FP8 ? 0 : 32;
  static constexpr int BYTES = 512 * VECTORS + SCALES;
};

#ifdef __CUDACC__
__device__ __forceinline__ void copy_16(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Expands the eight E2M1 values of a word to four pairs of bf16, times 2^-126. layout.BITS is the order of their bits.
__device__ __forceinline__ void expand_e2m1(uint32_t q, uint32_t (&pairs)[4]) {
  constexpr uint32_t ALL = 0x81C081C0, SIGN = 0x80008000, REST = 0x01C001C0;
  pairs[0] = q & ALL;
  pairs[1] = (q << 3) & ALL;
  pairs[2] = ((q << 6) & REST) | ((q << 1) & SIGN);
  pairs[3] = ((q >> 3) & REST) | ((q << 2) & SIGN);
}
// Expands the four E4M3 values of a word to two pairs of bf16, times 2^-120. linear.py has the order of their bits.
__device__ __forceinline__ void expand_e4m3(uint32_t q, uint32_t& first, uint32_t& second) {
  first = q & 0x87F087F0;
  second = ((q << 1) & 0x80008000) | ((q >> 3) & 0x07000700) | ((q << 4) & 0x00F000F0);
}

// Expands one chunk to the A fragments of its four steps of 16 columns.
template <int FORMAT>
__device__ __forceinline__ void expand(const uint8_t* chunk, int lane, const uint32_t (&select)[2], uint32_t (&a)[4][4]) {
  using C = Chunk<FORMAT>;
  uint32_t factor[2] = {0x7B807B80u, 0x7B807B80u};  // 2^120
  if (C::SCALES) {
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(chunk + 512 * C::VECTORS + 4 * (lane / 4));
    factor[0] = __byte_perm(scales, 0, select[0]) << 7, factor[1] = __byte_perm(scales, 0, select[1]) << 7;
  }
#pragma unroll
  for (int v = 0; v < C::VECTORS; ++v) {
    const uint4 q = *reinterpret_cast<const uint4*>(chunk + 512 * v + 16 * lane);
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
    constexpr int STEPS = 4 / C::VECTORS;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      uint32_t(&f)[4] = a[v * STEPS + s];
      if constexpr (FORMAT == MXFP4) {
        expand_e2m1(words[s], f);
      } else {
        expand_e4m3(words[2 * s], f[0], f[1]);
        expand_e4m3(words[2 * s + 1], f[2], f[3]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) f[j] = times(f[j], factor[j & 1]);
    }
  }
}

// For many rows: each warp has its own tiles, R at a time. The block's activations are in shared memory, in the order
// of B fragments; only the store of activations needs a barrier. A stage of the ring has STEP chunks of each of the R
// tiles.
template <int NT_, int R_, int WARPS_, int STEP_, int DEPTH_, int RESIDENT_>
struct Rows {
  static constexpr bool BY_ROWS = true;
  static constexpr int NT = NT_, R = R_, WARPS = WARPS_, STEP = STEP_, DEPTH = DEPTH_, RESIDENT = RESIDENT_;
  template <int FORMAT>
  static constexpr int STAGE = R * STEP * Chunk<FORMAT>::BYTES;
};

template <int FORMAT, class V>
__global__ void __launch_bounds__(V::WARPS * 32, V::RESIDENT) linear_rows(const Linear p) {
  using C = Chunk<FORMAT>;
  constexpr int NT = V::NT, R = V::R, STEP = V::STEP, DEPTH = V::DEPTH, STAGE = V::template STAGE<FORMAT>;
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint8_t* const ring = shared + warp * DEPTH * STAGE;
  uint4* const x = reinterpret_cast<uint4*>(shared + V::WARPS * DEPTH * STAGE);  // [chunks][2][NT][32]
  const uint32_t ring_address = static_cast<uint32_t>(__cvta_generic_to_shared(ring));
  const int group = blockIdx.x % p.token_groups, worker = blockIdx.x / p.token_groups * V::WARPS + warp;
  const int workers = gridDim.x / p.token_groups * V::WARPS, stages = p.chunks / STEP;
  const int64_t tile_bytes = static_cast<int64_t>(p.chunks) * C::BYTES;

  int next_tile = worker * R, next_stage = 0;
  const auto fetch = [&](int slot) {
    if (next_tile < p.tiles) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (next_tile + r < p.tiles) {
          const uint8_t* from = p.weight + (next_tile + r) * tile_bytes + next_stage * (STEP * C::BYTES);
          const uint32_t to = ring_address + slot * STAGE + r * STEP * C::BYTES;
          constexpr int FULL = STEP * C::BYTES / 512, REST = STEP * C::BYTES % 512;
#pragma unroll
          for (int i = 0; i < FULL; ++i) copy_16(to + 512 * i + 16 * lane, from + 512 * i + 16 * lane);
          if (REST && lane < REST / 16) copy_16(to + 512 * FULL + 16 * lane, from + 512 * FULL + 16 * lane);
        }
      }
      if (++next_stage == stages) next_stage = 0, next_tile += R * workers;
    }
    close_copies();
  };

  let_next_kernel_start();
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) fetch(d);
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < p.chunks * 2 * NT * 32; i += V::WARPS * 32) {
    const int l = i % 32, n = i / 32 % NT, pair = i / (32 * NT) % 2, chunk = i / (64 * NT);
    const int token = (group * NT + n) * 8 + l / 4, column = chunk * 64 + 16 * (l % 4) + 8 * pair;
    uint4 value{};
    if (token < p.tokens && column < p.columns)
      value = *reinterpret_cast<const uint4*>(p.x + token * p.x_stride + column);
    x[i] = value;
  }
  __syncthreads();

  const uint32_t select[2] = {t < 2 ? 0x4040u : 0x4242u, t < 2 ? 0x4141u : 0x4343u};
  int slot = 0;
  for (int tile = worker * R; tile < p.tiles; tile += R * workers) {
    float acc[R][NT][4] = {};
    const uint4* b = x + lane;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      wait_for_copies<DEPTH - 1>();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < STEP; ++i, b += 64 * NT) {
        uint32_t a[R][4][4];
#pragma unroll
        for (int r = 0; r < R; ++r) expand<FORMAT>(ring + slot * STAGE + (r * STEP + i) * C::BYTES, lane, select, a[r]);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint4 low = b[32 * n], high = b[32 * (NT + n)];
#pragma unroll
          for (int r = 0; r < R; ++r) {
            multiply_add(acc[r][n], a[r][0], low.x, low.y);
            multiply_add(acc[r][n], a[r][1], low.z, low.w);
            multiply_add(acc[r][n], a[r][2], high.x, high.y);
            multiply_add(acc[r][n], a[r][3], high.z, high.w);
          }
        }
      }
      __syncwarp();
      fetch(slot);
      if (++slot == DEPTH) slot = 0;
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int row = (tile + r) * 16 + 8 * upper + g;
        if (row >= p.rows) continue;
        const float scale = FORMAT == FP8 ? p.row_scales[row] : 1.0f, bias = p.bias ? __bfloat162float(p.bias[row]) : 0.0f;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const int token = (group * NT + n) * 8 + 2 * t + odd;
            if (token < p.tokens)
              p.out[static_cast<int64_t>(token) * p.rows + row] = __float2bfloat16(acc[r][n][2 * upper + odd] * scale + bias);
          }
      }
  }
}

// For few rows: the warps of a block share the columns of a tile.
template <int NT_, int CPW_, int WARPS_, int DEPTH_, int RESIDENT_, int TOGETHER_ = 1, bool AHEAD_ = false>
struct Columns {
  static constexpr bool BY_ROWS = false;
  static constexpr int NT = NT_, CPW = CPW_, WARPS = WARPS_, DEPTH = DEPTH_, RESIDENT = RESIDENT_, TOGETHER = TOGETHER_;
  static constexpr bool AHEAD = AHEAD_;  // the first tile is expanded before the preceding kernel has ended
};

// EXACT: each of WARPS warps has CPW chunks.
template <int FORMAT, class V, bool EXACT>
__global__ void __launch_bounds__(V::WARPS * 32, V::RESIDENT) linear_columns(const Linear p) {
  using C = Chunk<FORMAT>;
  constexpr int NT = V::NT, CPW = V::CPW, DEPTH = V::DEPTH, TOGETHER = V::TOGETHER;
  constexpr int SUMS = TOGETHER * NT * 128;  // floats that one warp stores
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = warp * CPW, count = EXACT ? CPW : min(max(p.chunks - first, 0), CPW);
  const int warps = EXACT ? V::WARPS : blockDim.x / 32;
  uint8_t* const ring = shared + warp * DEPTH * CPW * C::BYTES;
  const uint32_t ring_address = static_cast<uint32_t>(__cvta_generic_to_shared(ring));
  float* const sums = reinterpret_cast<float*>(shared + warps * DEPTH * CPW * C::BYTES);
  const int group = blockIdx.x % p.token_groups, worker = blockIdx.x / p.token_groups;
  const int workers = gridDim.x / p.token_groups;

  const auto fetch = [&](int tile, int slot) {
    if (tile < p.tiles) {
      const uint8_t* from = p.weight + (static_cast<int64_t>(tile) * p.chunks + first) * C::BYTES;
      const uint32_t to = ring_address + slot * CPW * C::BYTES;
      if (EXACT) {
        constexpr int FULL = CPW * C::BYTES / 512, REST = CPW * C::BYTES % 512;
#pragma unroll
        for (int i = 0; i < FULL; ++i) copy_16(to + 512 * i + 16 * lane, from + 512 * i + 16 * lane);
        if (REST && lane < REST / 16) copy_16(to + 512 * FULL + 16 * lane, from + 512 * FULL + 16 * lane);
      } else {
        for (int i = 16 * lane; i < count * C::BYTES; i += 512) copy_16(to + i, from + i);
      }
    }
    close_copies();
  };
  const auto tile_of = [&](int turn) { return TOGETHER * worker + turn % TOGETHER + turn / TOGETHER * TOGETHER * workers; };

  let_next_kernel_start();
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) fetch(tile_of(d), d);
  const uint32_t select[2] = {t < 2 ? 0x4040u : 0x4242u, t < 2 ? 0x4141u : 0x4343u};
  uint32_t ahead[V::AHEAD ? CPW : 1][4][4];
  if (V::AHEAD) {
    wait_for_copies<DEPTH - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CPW; ++i)
      if (i < count) expand<FORMAT>(ring + i * C::BYTES, lane, select, ahead[i]);
  }
  wait_for_previous_kernel();

  // B fragments: thread (g, t) holds columns 16 t to 16 t + 15 of each chunk of token g, four for each step of 16.
  uint4 x[CPW][NT][2];
#pragma unroll
  for (int i = 0; i < CPW; ++i)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int token = (group * NT + n) * 8 + g, column = (first + i) * 64 + 16 * t;
      x[i][n][0] = x[i][n][1] = uint4{};
      if (i < count && token < p.tokens && column < p.columns) {
        const uint4* from = reinterpret_cast<const uint4*>(p.x + token * p.x_stride + column);
        x[i][n][0] = from[0], x[i][n][1] = from[1];
      }
    }

  int half = 0, slot = 0;
  for (int turn = 0; tile_of(turn) < p.tiles; turn += TOGETHER) {
    float* const parts = sums + half * warps * SUMS;
    half ^= 1;
#pragma unroll
    for (int r = 0; r < TOGETHER; ++r) {
      float acc[NT][4] = {};
      const auto multiply = [&](const uint32_t(&a)[4][4], int i) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          multiply_add(acc[n], a[0], x[i][n][0].x, x[i][n][0].y);
          multiply_add(acc[n], a[1], x[i][n][0].z, x[i][n][0].w);
          multiply_add(acc[n], a[2], x[i][n][1].x, x[i][n][1].y);
          multiply_add(acc[n], a[3], x[i][n][1].z, x[i][n][1].w);
        }
      };
      if (V::AHEAD && turn + r == 0) {
#pragma unroll
        for (int i = 0; i < CPW; ++i)
          if (i < count) multiply(ahead[V::AHEAD ? i : 0], i);
      } else {
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < CPW; ++i) {
          if (i < count) {
            uint32_t a[4][4];
            expand<FORMAT>(ring + (slot * CPW + i) * C::BYTES, lane, select, a);
            multiply(a, i);
          }
        }
      }
      __syncwarp();  // lanes read bytes that other lanes copied; all must finish reading before the next copies
      fetch(tile_of(turn + r + DEPTH), slot);
      if (++slot == DEPTH) slot = 0;
#pragma unroll
      for (int n = 0; n < NT; ++n)
        *reinterpret_cast<float4*>(parts + warp * SUMS + (r * NT + n) * 128 + 4 * lane) =
            make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    }
    __syncthreads();  // one barrier per turn is enough, because `parts` alternates between two buffers
    for (int j = threadIdx.x; j < SUMS; j += blockDim.x) {
      const int row = j % 16, in_group = j % (NT * 128) / 16, token = group * NT * 8 + in_group;
      const int n = (tile_of(turn) + j / (NT * 128)) * 16 + row;
      if (token >= p.tokens || n >= p.rows) continue;
      const int at = j / 128 * 128 + ((row & 7) * 4 + (in_group & 7) / 2) * 4 + (row >> 3) * 2 + (in_group & 1);
      float sum = 0;
      if (EXACT) {
#pragma unroll
        for (int w = 0; w < V::WARPS; ++w) sum += parts[w * SUMS + at];
      } else {
        for (int w = 0; w < warps; ++w) sum += parts[w * SUMS + at];
      }
      if (FORMAT == FP8) sum *= p.row_scales[n];
      if (p.bias) sum += __bfloat162float(p.bias[n]);
      p.out[static_cast<int64_t>(token) * p.rows + n] = __float2bfloat16(sum);
    }
  }
}

template <class Kernel>
int start(Kernel kernel, Linear& p, int nt, int turns, int threads, int bytes, int blocks, cudaStream_t stream) {
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
    cudaGetLastError();
    return error == cudaErrorInvalidValue ? -1 : static_cast<int>(error);
  }
  p.token_groups = (p.tokens + 8 * nt - 1) / (8 * nt);
  const dim3 grid(min(turns, max(1, blocks / p.token_groups)) * p.token_groups);
  return launch(kernel, grid, threads, bytes, stream, p);
}

// `per_processor` is the number of blocks per multiprocessor. Fewer than fit leave room for the next kernel.
template <int FORMAT, class V>
int run(Linear p, int processors, int per_processor, cudaStream_t stream) {
  const int blocks = processors * per_processor;
  if constexpr (V::BY_ROWS) {
    if (p.chunks % V::STEP) return -1;
    const int bytes = V::WARPS * V::DEPTH * V::template STAGE<FORMAT> + p.chunks * V::NT * 1024;
    const int turns = (p.tiles + V::R * V::WARPS - 1) / (V::R * V::WARPS);
    return start(linear_rows<FORMAT, V>, p, V::NT, turns, V::WARPS * 32, bytes, blocks, stream);
  } else {
    const int warps = (p.chunks + V::CPW - 1) / V::CPW, turns = (p.tiles + V::TOGETHER - 1) / V::TOGETHER;
    if (warps > V::WARPS) return -1;
    const int bytes = warps * (V::DEPTH * V::CPW * Chunk<FORMAT>::BYTES + 2 * V::TOGETHER * V::NT * 512);
    const bool exact = p.chunks == V::WARPS * V::CPW;
    const auto kernel = exact ? linear_columns<FORMAT, V, true> : linear_columns<FORMAT, V, false>;
    return start(kernel, p, V::NT, turns, warps * 32, bytes, blocks, stream);
  }
}

using Runner = int (*)(Linear, int, int, cudaStream_t);
template <int FORMAT, class... V>
struct Table {
  static constexpr Runner RUNNERS[] = {run<FORMAT, V>...};
};
template <int FORMAT>
using Variants = Table<FORMAT,
  // linear.py refers to the variants by these numbers.
  Columns<1, 3, 15, 2, 2>,           // 0
  Columns<1, 3, 15, 3, 2, 2>,        // 1
  Columns<1, 4, 16, 2, 1, 1, true>,  // 2
  Columns<1, 4, 8, 4, 2, 1, true>,   // 3
  Columns<1, 4, 16, 1, 1>,           // 4
  Columns<1, 8, 16, 1, 1>,           // 5
  Columns<2, 3, 15, 2, 1>,           // 6
  Columns<2, 4, 16, 2, 1>,           // 7
  Columns<2, 4, 8, 4, 2>,            // 8
  Columns<2, 4, 16, 1, 1>,           // 9
  Rows<1, 1, 16, 3, 4, 1>,           // 10
  Rows<1, 1, 8, 1, 4, 1>,            // 11
  Rows<2, 1, 16, 3, 3, 1>,           // 12
  Rows<2, 1, 16, 1, 8, 1>,           // 13
  Rows<4, 1, 16, 1, 4, 1>,           // 14
  Rows<4, 2, 8, 1, 2, 1>>;           // 15

// Expands the weights to bf16 [rows][columns], one chunk per warp, for more tokens than the kernels above support.
template <int FORMAT>
__global__ void __launch_bounds__(256) expand_weight(const Linear p) {
  using C = Chunk<FORMAT>;
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 8 + warp;
  if (at >= static_cast<int64_t>(p.tiles) * p.chunks) return;
  uint8_t* const chunk = shared + warp * C::BYTES;
  for (int i = 16 * lane; i < C::BYTES; i += 512)
    *reinterpret_cast<uint4*>(chunk + i) = *reinterpret_cast<const uint4*>(p.weight + at * C::BYTES + i);
  __syncwarp();
  const uint32_t select[2] = {t < 2 ? 0x4040u : 0x4242u, t < 2 ? 0x4141u : 0x4343u};
  uint32_t a[4][4];
  expand<FORMAT>(chunk, lane, select, a);
  const int column = static_cast<int>(at % p.chunks) * 64 + 16 * t;
  if (column >= p.columns) return;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int row = static_cast<int>(at / p.chunks) * 16 + 8 * upper + g;
    if (row >= p.rows) continue;
    uint32_t pairs[8] = {a[0][upper], a[0][2 + upper], a[1][upper], a[1][2 + upper],
                         a[2][upper], a[2][2 + upper], a[3][upper], a[3][2 + upper]};
    if (FORMAT == FP8) {
      const float scale = p.row_scales[row];
#pragma unroll
      for (uint32_t& pair : pairs) {
        const float2 values = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
        const __nv_bfloat162 scaled = __floats2bfloat162_rn(values.x * scale, values.y * scale);
        pair = *reinterpret_cast<const uint32_t*>(&scaled);
      }
    }
    uint4* const to = reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(row) * p.columns + column);
    to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
  }
}

template <int FORMAT>
int run_expand(const Linear& p, cudaStream_t stream) {
  const int64_t chunks = static_cast<int64_t>(p.tiles) * p.chunks;
#ifdef __CUDACC__
  expand_weight<FORMAT><<<static_cast<unsigned>((chunks + 7) / 8), 256, 8 * Chunk<FORMAT>::BYTES, stream>>>(p);
  return cudaGetLastError();
#else
  return cpu::run(expand_weight<FORMAT>, static_cast<int>((chunks + 7) / 8), 256, 8 * Chunk<FORMAT>::BYTES, p);
#endif
}

}  // namespace spark

extern "C" {
int spark_linear_variant_count() { return sizeof(spark::Variants<0>::RUNNERS) / sizeof(spark::Runner); }
// Returns 0; -1 if the variant does not support the size or the device has too little shared memory; or CUDA's error.
int spark_linear(const spark::Linear* p, int format, int variant, int processors, int per_processor, void* stream) {
  constexpr const spark::Runner* TABLES[] = {spark::Variants<0>::RUNNERS, spark::Variants<1>::RUNNERS,
                                             spark::Variants<2>::RUNNERS};
  return TABLES[format][variant](*p, processors, per_processor, static_cast<cudaStream_t>(stream));
}
int spark_linear_expand(const spark::Linear* p, int format, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (format == spark::MXFP4) return spark::run_expand<spark::MXFP4>(*p, stream);
  return format == spark::MXFP8 ? spark::run_expand<spark::MXFP8>(*p, stream) : spark::run_expand<spark::FP8>(*p, stream);
}
const char* spark_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
