// Grouped GEMM of MXFP4 weights and bf16 activations for Hopper. Weights are the left operand of wgmma, expanded in
// registers.
//
// The kernel is persistent: a thread block computes one tile after another. A tile is 64·ROW_GROUPS weight rows by up
// to TOKENS tokens of one expert, over all columns. A producer warp copies weights and activations into a ring buffer
// of STAGES stages. From each stage a consumer warpgroup takes STEP chunks of 64 x 64 weights, expands them (16 bytes
// per thread) and multiplies. Sums are float32, in an order that depends only on the shape.
//
// Weights, and activations in planes, are loaded by bulk copies. Shapes with few tokens per tile gather the first
// product's activations from the tokens' rows instead, 16 bytes per lane. Gathering saves the kernel that writes
// planes, but was slower for many tokens.
#pragma once
#include "gemm_load.cuh"
#include "wgmma.cuh"

namespace spark {

// Multiplies one tile, adds this warpgroup's products to `sum`, and moves the ring past the tile's last stage.
// GATHERED: activations did not arrive by bulk copies, so the matrix instruction sees them only after a fence.
template <class S, bool GATHERED, int N>
__device__ __forceinline__ void multiply_tile(const Gemm& g, Ring<S>& ring, int group, float (&sum)[N / 2]) {
  static_assert(S::SPLIT == 1);
  const int thread = threadIdx.x & 127;
  uint32_t even[16], odd[16];
  const auto load = [&](uint32_t (&a)[16], int part) {
    expand(ring.w + ring.stage * S::W_BYTES + (group * S::CHUNKS + part) * CHUNK_BYTES, thread, a);
  };
  const auto issue = [&](uint32_t (&a)[16], int part) {
    const uint64_t b = wgmma_descriptor(ring.x + ring.stage * S::X_BYTES + part * S::TOKENS * PLANE_BYTES);
    pin(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) Wgmma<N>::run(sum, a + 4 * k, b + 2 * k);  // 16 columns, 2 units of 16 bytes
    wgmma_commit();
  };
  const auto wait = [&] {
    barrier_wait(ring.full_bar(), ring.parity);
    if constexpr (GATHERED) fence_for_matrix_instruction();
  };
  // Every lane arrives for its own reads. One arrival per warp would need a __syncwarp before it, which ptxas removes.
  const auto release = [&](int stage) { barrier_arrive(ring.empty_bar(stage)); };
  ring.stage = uniform(ring.stage), ring.parity = uniform(ring.parity);
  if constexpr (!S::AHEAD) {
    for (int first = 0; first < g.chunks; first += S::CHUNKS) {
      wait();
      if (S::CHUNKS == 1 || first + S::STEP <= g.chunks) {
        load(even, 0);
#pragma unroll
        for (int u = 0; u < S::STEP; ++u) {
          issue(u & 1 ? odd : even, u);
          if (u + 1 < S::STEP) load(u & 1 ? even : odd, u + 1);
          wgmma_wait<0>();
        }
      } else {  // the tile's last stage has fewer chunks
        for (int part = 0; first + part < g.chunks; ++part) {
          load(even, part);
          issue(even, part);
          wgmma_wait<0>();
        }
      }
      release(ring.stage);
      ring.next();
    }
  } else {
    const auto step = [&](uint32_t (&now)[16], uint32_t (&then)[16], bool more) {
      issue(now, 0);
      const int stage = ring.stage;
      ring.next();
      if (more) {
        wait();
        load(then, 0);
      }
      wgmma_wait<0>();
      release(stage);
    };
    wait();
    load(even, 0);
    int chunk = 0;
    for (; chunk + 2 < g.chunks; chunk += 2) {
      step(even, odd, true);
      step(odd, even, true);
    }
    if (chunk + 1 < g.chunks) {
      step(even, odd, true);
      step(odd, even, false);
    } else {
      step(even, odd, false);
    }
  }
}

// Releases the tile's stages without reading them, for a warpgroup that has no rows in the tile.
template <class S>
__device__ __forceinline__ void pass_tile(const Gemm& g, Ring<S>& ring) {
  for (int chunk = 0; chunk < g.chunks; chunk += S::CHUNKS, ring.next()) {
    barrier_wait(ring.full_bar(), ring.parity);
    barrier_arrive(ring.empty_bar(ring.stage));
  }
}

// The two functions below store the results. In a 16 x 8 block of sums a thread holds rows l/4 and l/4 + 8 of tokens
// 2(l%4) and 2(l%4) + 1. A warp transposes four blocks of 8 x 8 through its buffer in shared memory, so that each lane
// stores eight columns of one token, 16 bytes. In the first product rows 0-7 are gate rows and rows 8-15 the matching
// up rows, so four blocks are 8 columns of 32 tokens. In the second product four blocks are 16 columns of 16 tokens.
// 16 columns are 32 bytes, a whole sector of memory; a store of half a sector costs as much.
template <int N>
__device__ __forceinline__ void store_swiglu(const Gemm& g, const Tile& tile, int group, const float (&sum)[N / 2],
                                             const float (&bias)[2], uint8_t* staging) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  // `vector` is one of the eight in a plane's row, see layout.py.
  const int row_tile = tile.row_tile + group, vector = (row_tile & 1) * 4 + warp;
  uint8_t* plane = reinterpret_cast<uint8_t*>(g.out) + int64_t{row_tile / 2} * g.rows * PLANE_BYTES;
  const auto* staged = reinterpret_cast<const uint4*>(staging) + lane;
#pragma unroll
  for (int first = 0; first < N / 8; first += 4) {
    uint32_t blocks[4] = {};
#pragma unroll
    for (int j = first; j < first + 4 && j < N / 8; ++j) {
      const float low = activation(sum[4 * j] + bias[0], sum[4 * j + 2] + bias[1], g);
      const float high = activation(sum[4 * j + 1] + bias[0], sum[4 * j + 3] + bias[1], g);
      blocks[j - first] = pack(low, high);
    }
    store_transposed(shared_address(staged), blocks);
    __syncwarp();
    const int token = first * 8 + lane;
    uint8_t* to = plane + int64_t{tile.tokens.y + token} * PLANE_BYTES + ((vector ^ (token & 7)) << 4);
    if (token < tile.tokens.z) *reinterpret_cast<uint4*>(to) = *staged;
    __syncwarp();
  }
}

template <int N>
__device__ __forceinline__ void store_plain(const Gemm& g, const Tile& tile, int group, const float (&sum)[N / 2],
                                            const float (&bias)[2], uint8_t* staging) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, half = lane & 1;
  const int column = (tile.row_tile + group) * 64 + warp * 16 + half * 8;
  const auto* staged = reinterpret_cast<const uint4*>(staging) + (lane >> 4) * 16 + half * 8 + (lane >> 1 & 7);
  const bool inside = column < g.columns;
#pragma unroll
  for (int first = 0; first < N / 8; first += 2) {
    uint32_t blocks[4] = {};
#pragma unroll
    for (int j = first; j < first + 2 && j < N / 8; ++j) {
      blocks[2 * (j - first)] = pack(sum[4 * j] + bias[0], sum[4 * j + 1] + bias[0]);
      blocks[2 * (j - first) + 1] = pack(sum[4 * j + 2] + bias[1], sum[4 * j + 3] + bias[1]);
    }
    store_transposed(shared_address(staging + 16 * lane), blocks);
    __syncwarp();
    const int token = first * 8 + lane / 2;
    __nv_bfloat16* to = g.out + int64_t{tile.tokens.y + token} * g.columns + column;
    if (inside && token < tile.tokens.z) *reinterpret_cast<uint4*>(to) = *staged;
    __syncwarp();
  }
}

// Whether the warpgroups of a block store their results in turns. After the first such tile they reach the ends of
// their tiles at different times, so the matrix units have work while a warpgroup stores. In the first tile warpgroups
// wait for each other, so turns pay only if a block has many tiles. A warpgroup must not begin its next turn before the
// others have ended their current one, so a tile must have more stages than the ring.
template <class S>
__device__ __forceinline__ bool take_turns(const Gemm& g, int tile_number) {
  constexpr int MANY_TILES = 4;  // per block
  return S::AHEAD && g.chunks > S::STAGES && tile_number > MANY_TILES * static_cast<int>(gridDim.x);
}
__device__ __forceinline__ void begin_turn(int group) {
  if (group > 0) named_barrier(group, 256);
}
template <class S>
__device__ __forceinline__ void end_turn(int group) {
  if (group + 1 < S::GROUPS) named_barrier_arrive(group + 1, 256);
}

template <class S, bool SWIGLU, int N>
__device__ __forceinline__ void consume(const Gemm& g, Ring<S>& ring, const Tile& tile, uint8_t* staging, bool turns) {
  staging += uniform(threadIdx.x >> 5) * S::STAGING_BYTES;
  const int group = uniform(threadIdx.x >> 7), thread = threadIdx.x & 127;
  float sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[i] = 0;
  const bool there = tile.row_tile + group < g.row_tiles;
  const float* from = g.bias + (int64_t{tile.tokens.x} * g.row_tiles + tile.row_tile + (there ? group : 0)) * 64;
  const int row = (thread >> 5) * 16 + (thread & 31) / 4;
  const float bias[2] = {from[row], from[row + 8]};  // loaded before the long loop, to hide the latency
  if (there) {
    multiply_tile<S, SWIGLU && S::GATHERS, N>(g, ring, group, sum);
  } else {
    pass_tile<S>(g, ring);
  }
  if (turns) begin_turn(group);
  if (there) {
    if constexpr (SWIGLU) {
      store_swiglu<N>(g, tile, group, sum, bias, staging);
    } else {
      store_plain<N>(g, tile, group, sum, bias, staging);
    }
  }
  if (turns) end_turn<S>(group);
}

// Calls `consume` with the width for this tile's number of tokens. The width of a matrix instruction is fixed at
// compile time, so each width has its own code.
template <class S, bool SWIGLU, int N>
__device__ __forceinline__ void consume_width(const Gemm& g, Ring<S>& ring, const Tile& tile, uint8_t* staging,
                                              bool turns, int width) {
  if constexpr (N >= S::TOKENS) {
    consume<S, SWIGLU, S::TOKENS>(g, ring, tile, staging, turns);
  } else {
    if (width <= N) {
      consume<S, SWIGLU, N>(g, ring, tile, staging, turns);
    } else {
      consume_width<S, SWIGLU, next_width<N>()>(g, ring, tile, staging, turns, width);
    }
  }
}

template <class S, bool SWIGLU>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) grouped_gemm(const __grid_constant__ Gemm g) {
  extern __shared__ uint8_t raw[];
  uint8_t* base = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  Ring<S> ring(base);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; ++i) {
      barrier_init(ring.full + 8 * i, SWIGLU && S::GATHERS ? 1 + 32 : 1);
      barrier_init(ring.empty_bar(i), 128 * S::GROUPS);
    }
    fence_barriers();
  }
  __syncthreads();
  const int row_blocks = (g.row_tiles + S::ROW_GROUPS - 1) / S::ROW_GROUPS;
  if (uniform(threadIdx.x >> 7) == S::GROUPS) {
    if constexpr (S::REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if constexpr (SWIGLU && S::GATHERS) {
      produce_gathered<S>(g, ring, row_blocks);
    } else if (threadIdx.x == S::GROUPS * 128) {
      produce_planes<S, SWIGLU>(g, ring, row_blocks);
    }
  } else {
    if constexpr (S::REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
    // Consumers of the second product need not wait for the preceding kernel. They get its results only through the
    // producer's copies, and the producer waits; all other data that they read is older.
    if constexpr (SWIGLU) wait_for_previous_kernel();
    let_next_kernel_start();
    uint8_t* staging = base + S::STAGES * (S::X_BYTES + S::W_BYTES + 16);
    const int tile_number = uniform(*g.tile_count) * row_blocks;
    if (static_cast<int>(blockIdx.x) >= tile_number) return;
    Tile tile = later_tile<S>(g, blockIdx.x, 0, tile_number, row_blocks);
    const bool turns = take_turns<S>(g, tile_number);
    for (int index = blockIdx.x; index < tile_number; index += gridDim.x) {
      const Tile next = later_tile<S>(g, index, 1, tile_number, row_blocks);  // early, to hide the latency
      tile.tokens.z = uniform(tile.tokens.z);
      consume_width<S, SWIGLU, 8>(g, ring, tile, staging, turns, matrix_tokens(tile.tokens.z));
      tile = next;
    }
  }
}

}  // namespace spark
