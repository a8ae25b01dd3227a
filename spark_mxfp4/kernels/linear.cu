// Dense products with weights in 4 or 8 bits and few tokens, at the speed of memory: out[m][n] = Σ x[m][k] · w[n][k].
//
// Three kernels; in all of them expanded weights are the left operand of mma.m16n8k16, each warp copies the bytes that
// it will expand into a ring of its own, and the first of them are asked for before the kernel in front has ended,
// because weights do not depend on it. A chunk is 16 rows by 64 columns, a tile all chunks of 16 rows.
//   linear_columns: the warps of a block share a tile's columns and keep their part of the activations in registers.
//   linear_rows:    every warp has tiles of its own, and the activations lie in shared memory.
//   linear_strips:  up to 64 tokens in one pass over the weights. A warp multiplies several tiles at once, so that what
//                   it reads of the activations serves them all; columns are divided among warps and among the blocks
//                   of a cluster, so that a block needs a part of the activations only.
// One source serves compute capability 9.0 and 12.x: cp.async and mma of 8.0, and of 9.0 griddepcontrol, bulk copies
// and clusters. Sums are float32, in an order that depends on the variant and the sizes only.
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <atomic>

#include "overlap.cuh"
#else
#include "linear_on_cpu.h"  // the tests' stand-in for all that the hardware does
#endif

namespace spark {

enum Format { MXFP4 = 0, MXFP8 = 1, FP8 = 2 };
enum Kind { ROWS, COLUMNS, STRIPS };

struct Linear {
  const uint8_t* weight;         // [tiles][chunks][chunk bytes], see linear.py
  const float* row_scales;       // FP8: [tiles · 16]
  const __nv_bfloat16* bias;     // [rows] or null
  const __nv_bfloat16* x;        // [tokens][x_stride]
  __nv_bfloat16* out;            // [tokens][rows]
  int tokens, rows, columns, chunks, tiles, token_groups;
  int64_t x_stride;
};

template <int FORMAT>
struct Chunk {  // 16 rows by 64 columns
  static constexpr int VECTORS = FORMAT == MXFP4 ? 1 : 2;  // of 16 bytes a thread
  static constexpr int SCALES = FORMAT == FP8 ? 0 : 32;
  static constexpr int BYTES = 512 * VECTORS + SCALES;
};

#ifdef __CUDACC__
__device__ __forceinline__ uint8_t* shared_memory() {
  extern __shared__ __align__(16) uint8_t memory[];
  return memory;
}
__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
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

// Copies that a barrier counts (PTX ISA: mbarrier, cp.async.bulk): by the bytes of one thread, or by 16 bytes a thread.
__device__ __forceinline__ void make_barrier(uint64_t* barrier, int threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(threads) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_for_barrier(uint64_t* barrier, int phase) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "AGAIN:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra AGAIN;\n\t}"
      ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// 16 bytes, zeros where not `there`.
__device__ __forceinline__ void copy_16_or_zeros(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
// This thread arrives when its copies of 16 bytes have landed.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Store into the shared memory of block `rank` of this cluster, where this block has `to`.
__device__ __forceinline__ void store_in_block(float4* to, int rank, float4 value) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(to)), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
}
// This thread's number, read anew: what is computed from it need not stay in registers.
__device__ __forceinline__ int thread_again() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}
#endif

// Four E2M1 pairs of a word as bf16 pairs times 2^-126; the bits lie as layout.BITS says.
__device__ __forceinline__ void expand_e2m1(uint32_t q, uint32_t (&pairs)[4]) {
  constexpr uint32_t ALL = 0x81C081C0, SIGN = 0x80008000, REST = 0x01C001C0;
  pairs[0] = q & ALL;
  pairs[1] = (q << 3) & ALL;
  pairs[2] = ((q << 6) & REST) | ((q << 1) & SIGN);
  pairs[3] = ((q >> 3) & REST) | ((q << 2) & SIGN);
}
// Two E4M3 pairs of a word as bf16 pairs times 2^-120; the bits lie as linear.py says.
__device__ __forceinline__ void expand_e4m3(uint32_t q, uint32_t& first, uint32_t& second) {
  first = q & 0x87F087F0;
  second = ((q << 1) & 0x80008000) | ((q >> 3) & 0x07000700) | ((q << 4) & 0x00F000F0);
}

// What the chunk's two rows of a lane are multiplied by.
template <int FORMAT>
__device__ __forceinline__ void read_factors(const uint8_t* chunk, int lane, const uint32_t (&select)[2],
                                             uint32_t (&factor)[2]) {
  using C = Chunk<FORMAT>;
  factor[0] = factor[1] = 0x7B807B80u;  // 2^120
  if (C::SCALES) {
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(chunk + 512 * C::VECTORS + 4 * (lane / 4));
    factor[0] = __byte_perm(scales, 0, select[0]) << 7, factor[1] = __byte_perm(scales, 0, select[1]) << 7;
  }
}

// The A fragments of one chunk for its four steps.
template <int FORMAT>
__device__ __forceinline__ void expand(const uint8_t* chunk, int lane, const uint32_t (&select)[2], uint32_t (&a)[4][4]) {
  using C = Chunk<FORMAT>;
  uint32_t factor[2];
  read_factors<FORMAT>(chunk, lane, select, factor);
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

// Many rows: every warp has tiles of its own, R at a time, and the block's activations lie in shared memory in the order
// of B fragments. No barrier but the first. A stage of the ring has STEP chunks of each of the R tiles.
template <int NT_, int R_, int WARPS_, int STEP_, int DEPTH_, int RESIDENT_>
struct Rows {
  static constexpr Kind KIND = ROWS;
  static constexpr int NT = NT_, R = R_, WARPS = WARPS_, STEP = STEP_, DEPTH = DEPTH_, RESIDENT = RESIDENT_;
  template <int FORMAT>
  static constexpr int STAGE = R * STEP * Chunk<FORMAT>::BYTES;
};

template <int FORMAT, class V>
__global__ void __launch_bounds__(V::WARPS * 32, V::RESIDENT) linear_rows(const Linear p) {
  using C = Chunk<FORMAT>;
  constexpr int NT = V::NT, R = V::R, STEP = V::STEP, DEPTH = V::DEPTH, STAGE = V::template STAGE<FORMAT>;
  uint8_t* const shared = shared_memory();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint8_t* const ring = shared + warp * DEPTH * STAGE;
  uint4* const x = reinterpret_cast<uint4*>(shared + V::WARPS * DEPTH * STAGE);  // [chunks][2][NT][32]
  const uint32_t ring_address = shared_address(ring);
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

// Few rows: the warps of a block share a tile's columns.
template <int NT_, int CPW_, int WARPS_, int DEPTH_, int RESIDENT_, int TOGETHER_ = 1, bool AHEAD_ = false>
struct Columns {
  static constexpr Kind KIND = COLUMNS;
  static constexpr int NT = NT_, CPW = CPW_, WARPS = WARPS_, DEPTH = DEPTH_, RESIDENT = RESIDENT_, TOGETHER = TOGETHER_;
  static constexpr bool AHEAD = AHEAD_;  // the first tile is expanded before the kernel in front has ended
};

// EXACT: each of WARPS warps has CPW chunks.
template <int FORMAT, class V, bool EXACT>
__global__ void __launch_bounds__(V::WARPS * 32, V::RESIDENT) linear_columns(const Linear p) {
  using C = Chunk<FORMAT>;
  constexpr int NT = V::NT, CPW = V::CPW, DEPTH = V::DEPTH, TOGETHER = V::TOGETHER;
  constexpr int SUMS = TOGETHER * NT * 128;  // floats of one warp
  uint8_t* const shared = shared_memory();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = warp * CPW, count = EXACT ? CPW : min(max(p.chunks - first, 0), CPW);
  const int warps = EXACT ? V::WARPS : blockDim.x / 32;
  uint8_t* const ring = shared + warp * DEPTH * CPW * C::BYTES;
  const uint32_t ring_address = shared_address(ring);
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
      __syncwarp();  // lanes read what others have copied
      fetch(tile_of(turn + r + DEPTH), slot);
      if (++slot == DEPTH) slot = 0;
#pragma unroll
      for (int n = 0; n < NT; ++n)
        *reinterpret_cast<float4*>(parts + warp * SUMS + (r * NT + n) * 128 + 4 * lane) =
            make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    }
    __syncthreads();  // one for each turn is enough, because `parts` alternate
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

// Up to 64 tokens in one pass. A warp multiplies R tiles at once by its range of columns.
template <int NT_, int R_, int WARPS_, int STEP_, int RESIDENT_>
struct Strips {
  static constexpr Kind KIND = STRIPS;
  static constexpr int NT = NT_, R = R_, WARPS = WARPS_, STEP = STEP_, RESIDENT = RESIDENT_;
  template <int FORMAT>
  static constexpr int STAGE = R * STEP * Chunk<FORMAT>::BYTES;  // a stage of a warp's ring
  // x lies in shared memory two chunks side by side: [token][128 columns]. Sixteen bytes more for each token, so that
  // eight lanes that read at once read from different banks.
  static constexpr int X_ROW = 2 * 128 + 16, X_PAIR = 8 * NT * X_ROW;
  // Barriers lie in front of what they count: a ring's, one for each stage, and a slot's, with the count of its readers.
  static constexpr int MOST_DEPTH = 16, RING_HEAD = 8 * MOST_DEPTH, SLOT_HEAD = 16;
};

// How a launch of linear_strips divides its work. A strip is groups · R tiles. The blocks of a cluster have one strip and
// `parts` of its columns; within a block `groups` warps stand side by side, and `subs` such rows of warps have a range of
// the part's columns each. x is kept in slots of slot_chunks (even) · 64 columns, `slots` for each range: all of its
// columns, or, where `streamed`, a ring. With more than one range or part each block takes one strip.
struct Plan {
  int parts, groups, subs, depth, slots, slot_chunks, streamed;
  int ring, x_slot, mail;  // bytes of a warp's ring, of a slot, and of what a block gets from its cluster
  int bytes() const { return mail + groups * subs * ring + subs * slots * x_slot; }
};

// acc += R tiles' chunk times x, where this lane's columns of its first token lie at `x`.
template <int FORMAT, class V>
__device__ __forceinline__ void multiply_chunk(float (&acc)[V::R][V::NT][4], const uint8_t* chunk, const uint8_t* x,
                                               int lane) {
  using C = Chunk<FORMAT>;
  const uint32_t pick = 0x4040u + 0x101u * (lane & 2), select[2] = {pick, pick + 0x101u};
  constexpr int NT = V::NT, R = V::R, to_next_tile = V::STEP * C::BYTES;
  uint32_t factor[R][2];
  uint4 q[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    read_factors<FORMAT>(chunk + r * to_next_tile, lane, select, factor[r]);
    if (C::VECTORS == 1) q[r] = *reinterpret_cast<const uint4*>(chunk + r * to_next_tile + 16 * lane);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t a[R][2][4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (C::VECTORS == 2) q[r] = *reinterpret_cast<const uint4*>(chunk + r * to_next_tile + 512 * half + 16 * lane);
      if constexpr (FORMAT == MXFP4) {
        expand_e2m1(half ? q[r].z : q[r].x, a[r][0]);
        expand_e2m1(half ? q[r].w : q[r].y, a[r][1]);
      } else {
        expand_e4m3(q[r].x, a[r][0][0], a[r][0][1]);
        expand_e4m3(q[r].y, a[r][0][2], a[r][0][3]);
        expand_e4m3(q[r].z, a[r][1][0], a[r][1][1]);
        expand_e4m3(q[r].w, a[r][1][2], a[r][1][3]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) a[r][j / 4][j % 4] = times(a[r][j / 4][j % 4], factor[r][j & 1]);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint4 b = *reinterpret_cast<const uint4*>(x + 8 * n * V::X_ROW + 16 * half);
#pragma unroll
      for (int r = 0; r < R; ++r) multiply_add(acc[r][n], a[r][0], b.x, b.y);
#pragma unroll
      for (int r = 0; r < R; ++r) multiply_add(acc[r][n], a[r][1], b.z, b.w);
    }
  }
}

// Writes a lane's sums of one row, for the tokens 8 n + 2 (lane % 4) and the next of COUNT n.
template <int FORMAT, int COUNT, class Sums>
__device__ __forceinline__ void write_row(const Linear& p, int tile, int upper, int first_n, int lane, const Sums& sums) {
  const int row = tile * 16 + 8 * upper + lane / 4;
  if (tile >= p.tiles || row >= p.rows) return;
  const float scale = FORMAT == FP8 ? p.row_scales[row] : 1.0f, bias = p.bias ? __bfloat162float(p.bias[row]) : 0.0f;
  int token = 8 * first_n + 2 * (lane % 4);
  __nv_bfloat16* to = p.out + static_cast<int64_t>(token) * p.rows + row;
#pragma unroll
  for (int n = 0; n < COUNT; ++n, token += 8, to += static_cast<int64_t>(8) * p.rows) {
    if (token < p.tokens) to[0] = __float2bfloat16(sums(n, 0) * scale + bias);
    if (token + 1 < p.tokens) to[p.rows] = __float2bfloat16(sums(n, 1) * scale + bias);
  }
}

// Adds up what the ranges and the parts have and writes it. Every warp has read all of its ring.
template <int FORMAT, class V>
__device__ __forceinline__ void collect(const Linear& p, const Plan& plan, float (&acc)[V::R][V::NT][4]) {
  constexpr int NT = V::NT, UNIT = V::R * NT;
  const int warp = thread_again() / 32, lane = thread_again() % 32;
  const int group = warp % plan.groups, sub = warp / plan.groups, warps = plan.groups * plan.subs;
  const int part = blockIdx.x % plan.parts, strip = blockIdx.x / plan.parts * plan.groups * V::R;
  uint8_t* const mail = shared_memory();
  uint8_t* const rings = mail + plan.mail;

  // Sums over the ranges of this block: a unit is 16 rows by 8 tokens, and range u % subs collects unit u of a group.
  if (plan.subs > 1) {
    float4* const given = reinterpret_cast<float4*>(rings + warp * plan.ring + V::RING_HEAD) + lane;
    int owner = 0;
#pragma unroll
    for (int u = 0; u < UNIT; ++u) {
      const float(&sums)[4] = acc[u / NT][u % NT];
      if (owner != sub) given[u * 32] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      if (++owner == plan.subs) owner = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int other = 0; other < plan.subs; ++other) {
      if (other == sub) continue;
      const uint8_t* const from = rings + (other * plan.groups + group) * plan.ring + V::RING_HEAD;
      const float4* const taken = reinterpret_cast<const float4*>(from) + lane;
      owner = 0;
#pragma unroll
      for (int u = 0; u < UNIT; ++u) {
        float(&sums)[4] = acc[u / NT][u % NT];
        if (owner == sub) {
          const float4 more = taken[u * 32];
          sums[0] += more.x, sums[1] += more.y, sums[2] += more.z, sums[3] += more.w;
        }
        if (++owner == plan.subs) owner = 0;
      }
    }
  }
  // Sums over the parts: block u % parts collects unit u of the strip.
  const int units = plan.groups * UNIT, share = (units + plan.parts - 1) / plan.parts;
  float4* const letters = reinterpret_cast<float4*>(mail) + lane;  // [part][share][lane]
  if (plan.parts > 1) wait_for_cluster();                          // every block has begun
  int owner = 0, to = group * UNIT % plan.parts, index = part * share + group * UNIT / plan.parts;
#pragma unroll
  for (int u = 0; u < UNIT; ++u) {
    const float(&sums)[4] = acc[u / NT][u % NT];
    if (owner == sub) store_in_block(letters + index * 32, to, make_float4(sums[0], sums[1], sums[2], sums[3]));
    if (++owner == plan.subs) owner = 0;
    if (++to == plan.parts) to = 0, ++index;
  }
  if (plan.parts > 1) {
    arrive_at_cluster();
    wait_for_cluster();
  } else {
    __syncthreads();
  }
#pragma unroll 1
  for (int i = warp; i * plan.parts + part < units; i += warps) {
    const int unit = i * plan.parts + part, tile = strip + unit / NT, n = unit % NT;
    if (tile >= p.tiles || 8 * n >= p.tokens) continue;
    float4 total = letters[i * 32];
    for (int from = 1; from < plan.parts; ++from) {
      const float4 more = letters[(from * share + i) * 32];
      total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
    }
    write_row<FORMAT, 1>(p, tile, 0, n, lane, [&](int, int odd) { return odd ? total.y : total.x; });
    write_row<FORMAT, 1>(p, tile, 1, n, lane, [&](int, int odd) { return odd ? total.w : total.z; });
  }
}

template <int FORMAT, class V>
__global__ void __launch_bounds__(V::WARPS * 32, V::RESIDENT) linear_strips(const Linear p, const Plan plan) {
  using C = Chunk<FORMAT>;
  constexpr int NT = V::NT, R = V::R, STEP = V::STEP, STAGE = V::template STAGE<FORMAT>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = warp % plan.groups, sub = warp / plan.groups, warps = plan.groups * plan.subs;
  const int part = blockIdx.x % plan.parts, worker = blockIdx.x / plan.parts, workers = gridDim.x / plan.parts;
  const int part_first = p.chunks * part / plan.parts, part_chunks = p.chunks * (part + 1) / plan.parts - part_first;
  const int first = part_first + part_chunks * sub / plan.subs, end = part_first + part_chunks * (sub + 1) / plan.subs;
  const int strip_tiles = plan.groups * R, blocks_of_x = (end - first + plan.slot_chunks - 1) / plan.slot_chunks;

  uint8_t* const mail = shared_memory();
  uint8_t* const rings = mail + plan.mail;
  uint8_t* const ring = rings + warp * plan.ring;
  uint8_t* const x = rings + warps * plan.ring + sub * plan.slots * plan.x_slot;
  const auto landed = [&](int slot) { return reinterpret_cast<uint64_t*>(ring) + slot; };
  const auto x_landed = [&](int slot) { return reinterpret_cast<uint64_t*>(x + slot * plan.x_slot); };
  const auto readers = [&](int slot) { return reinterpret_cast<int*>(x + slot * plan.x_slot + 8); };

  int next_tile = worker * strip_tiles + group * R, next_chunk = first;
  const auto fetch = [&](int slot) {
    if (next_tile >= p.tiles) return;
    const int bytes = min(STEP, end - next_chunk) * C::BYTES;
    if (lane == 0) {
      const int tiles = min(R, p.tiles - next_tile);
      const uint8_t* from = p.weight + (static_cast<int64_t>(next_tile) * p.chunks + next_chunk) * C::BYTES;
      expect_bytes(landed(slot), tiles * bytes);
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (r < tiles)
          copy_bytes(ring + V::RING_HEAD + slot * STAGE + r * (STEP * C::BYTES),
                     from + r * static_cast<int64_t>(p.chunks) * C::BYTES, bytes, landed(slot));
    }
    next_chunk += STEP;
    if (next_chunk >= end) next_chunk = first, next_tile += workers * strip_tiles;
  };
  const auto fetch_x = [&](int block, int slot) {  // by one warp
    uint8_t* to = x + slot * plan.x_slot + V::SLOT_HEAD + lane % 16 * 16;
    int column = (first + block * plan.slot_chunks) * 64 + lane % 16 * 8;
    for (int pair = 0; pair < plan.slot_chunks; pair += 2, column += 128, to += V::X_PAIR) {
      const bool there = column < min(end * 64, p.columns);
      const __nv_bfloat16* const from = there ? p.x + column : p.x;
#pragma unroll 4
      for (int token = lane / 16; token < p.tokens; token += 2)
        copy_16_or_zeros(to + token * V::X_ROW, from + token * p.x_stride, there);
    }
    arrive_with_copies(x_landed(slot));
  };

  let_next_kernel_start();
  if (lane == 0) {
#pragma unroll 1
    for (int d = 0; d < plan.depth; ++d) make_barrier(landed(d), 1);
    if (group == 0) {
#pragma unroll 1
      for (int s = 0; s < plan.slots; ++s) make_barrier(x_landed(s), 32), *readers(s) = 0;
    }
    publish_barriers();
  }
#pragma unroll 1
  for (int d = 0; d < plan.depth; ++d) fetch(d);
  __syncthreads();
  if (plan.parts > 1) arrive_at_cluster();
  wait_for_previous_kernel();
#pragma unroll 1
  for (int s = group; s < min(plan.slots, blocks_of_x); s += plan.groups) fetch_x(s, s);

  float acc[R][NT][4];
  int slot = 0, phase = 0, x_slot = 0, x_phase = 0;
#pragma unroll 1
  for (int strip = worker * strip_tiles; strip < p.tiles; strip += workers * strip_tiles) {
    const int tile = strip + group * R;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int n = 0; n < NT; ++n) acc[r][n][0] = acc[r][n][1] = acc[r][n][2] = acc[r][n][3] = 0;
    if (!plan.streamed) x_slot = 0;
#pragma unroll 1
    for (int chunk = first; chunk < end;) {
      const int block_end = min(chunk + plan.slot_chunks, end);
      // A warp without a tile waits as well: its count must not run ahead of those that read.
      if (tile < p.tiles || plan.streamed) wait_for_barrier(x_landed(x_slot), x_phase);
      if (tile < p.tiles) {
        const uint8_t* const columns = x + x_slot * plan.x_slot + V::SLOT_HEAD + g * V::X_ROW + 32 * t;
        const int slot_first = chunk;
#pragma unroll 1
        for (; chunk < block_end; chunk += STEP) {
          wait_for_barrier(landed(slot), phase);
          const uint8_t* stage = ring + V::RING_HEAD + slot * STAGE;
#pragma unroll(NT * R <= 4 ? STEP : 1)
          for (int i = 0; i < STEP; ++i) {
            const int at = chunk + i - slot_first;
            if (STEP == 1 || chunk + i < block_end)
              multiply_chunk<FORMAT, V>(acc, stage + i * C::BYTES, columns + at / 2 * V::X_PAIR + at % 2 * 128, lane);
          }
          __syncwarp();
          fetch(slot);
          if (++slot == plan.depth) slot = 0, phase ^= 1;
        }
      }
      chunk = block_end;
      if (plan.streamed) {  // the warp that reads a slot last fills it again
        int is_last = 0;
        __syncwarp();
        if (lane == 0) {
          __threadfence_block();
          is_last = atomicAdd(readers(x_slot), 1) == warps - 1;
          if (is_last) *readers(x_slot) = 0, __threadfence_block();
        }
        is_last = __shfl_sync(~0u, is_last, 0);
        int next = (chunk - 1) / plan.slot_chunks + plan.slots;  // a range of all columns begins at 0
        const bool wraps = next >= blocks_of_x;
        if (wraps) next -= blocks_of_x;
        if (is_last && (!wraps || strip + workers * strip_tiles < p.tiles)) fetch_x(next, x_slot);
        if (++x_slot == plan.slots) x_slot = 0, x_phase ^= 1;
      } else {
        ++x_slot;
      }
    }
    if (plan.parts * plan.subs == 1) {
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper)
          write_row<FORMAT, NT>(p, tile + r, upper, 0, lane, [&](int n, int odd) { return acc[r][n][2 * upper + odd]; });
    }
  }
  if (plan.parts * plan.subs > 1) collect<FORMAT, V>(p, plan, acc);
}

template <class Kernel, class... More>
int launch(Kernel kernel, int blocks, int cluster, int threads, int bytes, cudaStream_t stream, const More&... more) {
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
    cudaGetLastError();
    return error == cudaErrorInvalidValue ? -1 : static_cast<int>(error);
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, more...);
}

// What linear_strips has to know of the device. `clusters`: of `parts` blocks, one block a multiprocessor.
struct Device {
  int processors, bytes_of_block, bytes_of_processor, clusters;
};

// Plans a launch of linear_strips. `parts` is 0 where every warp takes all columns of its tiles, one strip after another;
// else the blocks of a cluster. Returns false where the size does not fit; `blocks` is the grid.
template <int FORMAT, class V>
bool make_plan(const Linear& p, const Device& device, int per_processor, int parts, Plan& plan, int& blocks) {
  constexpr int R = V::R, STEP = V::STEP, LEAST_DEPTH = 2;
  const auto over = [](int a, int b) { return (a + b - 1) / b; };
  const bool loops = parts == 0;
  if (p.tokens > 8 * V::NT || parts > p.chunks) return false;
  const int limit = V::RESIDENT == 1 ? device.bytes_of_block
                                     : min(device.bytes_of_block, device.bytes_of_processor / V::RESIDENT - 1024);
  plan = Plan{};
  plan.parts = max(parts, 1);
  const int part_chunks = over(p.chunks, plan.parts);
  int most_subs = 1;
  if (loops) {
    plan.groups = V::WARPS;
  } else {
    const int clusters = device.clusters * per_processor;
    if (clusters == 0) return false;
    plan.groups = over(over(p.tiles, clusters), R);
    if (plan.groups > V::WARPS) return false;
    most_subs = min(V::WARPS / plan.groups, p.chunks / plan.parts);
  }
  const int strips = over(p.tiles, plan.groups * R);
  blocks = loops ? min(strips, device.processors * per_processor) : strips * plan.parts;
  const auto fits = [&](int slot_chunks, int slots) {
    const int columns = over(part_chunks, plan.subs), stages = over(columns, STEP), wanted = loops ? 2 * stages : stages;
    const int sums = plan.subs > 1 ? R * V::NT * 512 : 0;  // they go through the rings
    plan.slot_chunks = slot_chunks, plan.slots = slots ? slots : over(columns, slot_chunks);
    plan.x_slot = V::SLOT_HEAD + slot_chunks / 2 * V::X_PAIR;
    if (plan.parts * plan.subs > 1) plan.mail = over(plan.groups * R * V::NT, plan.parts) * plan.parts * 512;
    for (plan.depth = min(wanted, V::MOST_DEPTH); plan.depth >= min(wanted, LEAST_DEPTH); --plan.depth) {
      plan.ring = V::RING_HEAD + max(plan.depth * V::template STAGE<FORMAT>, sums);
      if (plan.bytes() <= limit) return true;
    }
    return false;
  };
  for (plan.subs = most_subs; plan.subs >= 1; --plan.subs)
    if (fits(loops ? 4 : 2, 0)) return true;
  plan.subs = plan.streamed = 1;
  return loops && p.chunks > 12 && (fits(4, 3) || fits(2, 3));
}

// The number of clusters of `parts` blocks that run at once with one block a multiprocessor, or 0; asked for once.
template <class Kernel>
int clusters_at_once(Kernel kernel, int device, int parts, int bytes) {
  constexpr int DEVICES = 16, PARTS = 8;
  static std::atomic<int> known[DEVICES][PARTS + 1];  // plus one
  if (device < 0 || device >= DEVICES || parts > PARTS) return 0;
  int number = known[device][parts].load();
  if (number) return number - 1;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = parts, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(parts), config.blockDim = dim3(128), config.dynamicSmemBytes = bytes;
  config.attrs = &cluster, config.numAttrs = 1;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) ||
      cudaOccupancyMaxActiveClusters(&number, kernel, &config))
    cudaGetLastError(), number = 0;
  known[device][parts].store(number + 1);
  return number;
}

// `per_processor`: blocks that a multiprocessor gets; fewer than fit leave room for the kernel that comes next.
// `parts` is for linear_strips, see make_plan.
template <int FORMAT, class V>
int run(Linear p, int processors, int per_processor, int parts, cudaStream_t stream) {
  const int blocks = processors * per_processor;
  p.token_groups = (p.tokens + 8 * V::NT - 1) / (8 * V::NT);
  const auto grid = [&](int turns) { return min(turns, max(1, blocks / p.token_groups)) * p.token_groups; };
  if constexpr (V::KIND == ROWS) {
    if (p.chunks % V::STEP) return -1;
    const int bytes = V::WARPS * V::DEPTH * V::template STAGE<FORMAT> + p.chunks * V::NT * 1024;
    const int turns = (p.tiles + V::R * V::WARPS - 1) / (V::R * V::WARPS);
    return launch(linear_rows<FORMAT, V>, grid(turns), 1, V::WARPS * 32, bytes, stream, p);
  } else if constexpr (V::KIND == COLUMNS) {
    const int warps = (p.chunks + V::CPW - 1) / V::CPW, turns = (p.tiles + V::TOGETHER - 1) / V::TOGETHER;
    if (warps > V::WARPS) return -1;
    const int bytes = warps * (V::DEPTH * V::CPW * Chunk<FORMAT>::BYTES + 2 * V::TOGETHER * V::NT * 512);
    const bool exact = p.chunks == V::WARPS * V::CPW;
    const auto kernel = exact ? linear_columns<FORMAT, V, true> : linear_columns<FORMAT, V, false>;
    return launch(kernel, grid(turns), 1, warps * 32, bytes, stream, p);
  } else {
    int number;
    Device device{processors};
    if (const cudaError_t error = cudaGetDevice(&number)) return error;
    cudaDeviceGetAttribute(&device.bytes_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, number);
    cudaDeviceGetAttribute(&device.bytes_of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, number);
    const auto kernel = linear_strips<FORMAT, V>;
    device.clusters = parts > 1 ? clusters_at_once(kernel, number, parts, device.bytes_of_block) : processors;
    Plan plan;
    int strips_blocks;
    if (!make_plan<FORMAT, V>(p, device, per_processor, parts, plan, strips_blocks)) return -1;
    const int threads = plan.groups * plan.subs * 32;
    const int error = launch(kernel, strips_blocks, plan.parts, threads, plan.bytes(), stream, p, plan);
    if (error > 0 && plan.parts > 1) return cudaGetLastError(), -1;  // a device may have no room for a cluster
    return error;
  }
}

using Runner = int (*)(Linear, int, int, int, cudaStream_t);
template <int FORMAT, class... V>
struct Table {
  static constexpr Runner RUNNERS[] = {run<FORMAT, V>...};
};
template <int FORMAT>
using Variants = Table<FORMAT,
  // linear.py chooses among them by these numbers.
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
  Rows<4, 2, 8, 1, 2, 1>,            // 15
  Strips<1, 1, 16, 2, 1>,            // 16
  Strips<1, 2, 16, 2, 1>,            // 17
  Strips<1, 3, 16, 2, 1>,            // 18
  Strips<1, 1, 8, 2, 2>,             // 19
  Strips<1, 2, 8, 2, 2>,             // 20
  Strips<2, 1, 16, 2, 1>,            // 21
  Strips<2, 2, 16, 2, 1>,            // 22
  Strips<2, 3, 16, 1, 1>,            // 23
  Strips<2, 1, 8, 2, 2>,             // 24
  Strips<2, 2, 8, 2, 2>,             // 25
  Strips<4, 1, 16, 2, 1>,            // 26
  Strips<4, 2, 12, 2, 1>,            // 27
  Strips<4, 2, 8, 2, 2>,             // 28
  Strips<4, 3, 8, 1, 1>,             // 29
  Strips<4, 4, 8, 1, 1>,             // 30
  Strips<8, 1, 12, 1, 1>,            // 31
  Strips<8, 2, 8, 1, 1>,             // 32
  Strips<8, 2, 4, 1, 2>,             // 33
  Strips<8, 3, 8, 1, 1>,             // 34
  Strips<1, 1, 12, 2, 2>>;           // 35

// The weights as bf16 [rows][columns], for more tokens than the kernels above are made for: a warp takes a chunk.
template <int FORMAT>
__global__ void __launch_bounds__(256) expand_weight(const Linear p) {
  using C = Chunk<FORMAT>;
  uint8_t* const shared = shared_memory();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 8 + warp;
  let_next_kernel_start();
  wait_for_previous_kernel();
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
  return launch(expand_weight<FORMAT>, static_cast<int>((chunks + 7) / 8), 1, 256, 8 * Chunk<FORMAT>::BYTES, stream, p);
}

}  // namespace spark

extern "C" {
int spark_linear_variant_count() { return sizeof(spark::Variants<0>::RUNNERS) / sizeof(spark::Runner); }
// Returns 0, -1 where the variant cannot take the size or the device lacks the shared memory, else CUDA's error number.
int spark_linear(const spark::Linear* p, int format, int variant, int processors, int per_processor, int parts,
                 void* stream) {
  constexpr const spark::Runner* TABLES[] = {spark::Variants<0>::RUNNERS, spark::Variants<1>::RUNNERS,
                                             spark::Variants<2>::RUNNERS};
  return TABLES[format][variant](*p, processors, per_processor, parts, static_cast<cudaStream_t>(stream));
}
int spark_linear_expand(const spark::Linear* p, int format, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (format == spark::MXFP4) return spark::run_expand<spark::MXFP4>(*p, stream);
  return format == spark::MXFP8 ? spark::run_expand<spark::MXFP8>(*p, stream) : spark::run_expand<spark::FP8>(*p, stream);
}
const char* spark_linear_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
