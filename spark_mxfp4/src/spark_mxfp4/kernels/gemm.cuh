// Grouped product of MXFP4 weights and bf16 activations for Hopper: weights are the left operand, expanded in registers.
//
// A thread block takes one tile of 64·ROW_GROUPS weight rows by up to TOKENS tokens of one expert, walks along the
// columns, then takes its next tile. One warp copies weights and activations into a ring of STAGES; warpgroups expand
// 64 x 64 weights each from 16 bytes a thread, STEP times, and multiply. With SPLIT above 1 as many warpgroups share a
// tile's rows and take the columns in turns (layer.cuh). Sums are float32; their order depends on the shape only.
//
// Weights come by bulk copies, and so do activations that lie in planes. Shapes for few tokens a tile take the first
// product's activations from the tokens' rows, by 16 bytes a lane, which saves a kernel that writes planes; for many
// tokens that was slower (performance.md).
#pragma once
#include <cuda_bf16.h>

#include "instructions.cuh"
#include "overlap.cuh"
#include "wgmma.cuh"

namespace spark {

constexpr int CHUNK = 64;                           // columns of a chunk
constexpr int VALUE_BYTES = 64 * CHUNK / 2;         // 64 rows
constexpr int CHUNK_BYTES = VALUE_BYTES + 64 * 2;   // and a scale for each row and 32 columns
constexpr int PLANE_BYTES = CHUNK * 2;              // a row's bytes in one plane of activations
constexpr int STAGING_BYTES = 4 * 8 * 8 * 2;        // a warp's results on their way to memory

// Columns of a chunk of activations are kept in the order in which a thread's weights of one scale belong to the matrix
// instruction's steps (layout.py): step, bit 1 of the column, its block of 32, bit 2, bit 0. A vector of 16 bytes is four
// words, pairs of columns; this is which of the chunk's 32 pairs a word is.
__device__ __forceinline__ int pair_at(int vector, int word) {
  return vector / 2 * 4 + (vector & 1) + (word & 1) * 2 + (word >> 1) * 16;
}

struct Gemm {
  const uint8_t* weight;     // [experts][row tiles][chunks][CHUNK_BYTES], see layout.py
  const float* bias;         // [experts][row tiles · 64] in the weights' order of rows
  const uint8_t* x;          // planes [chunks][rows][PLANE_BYTES]; first of S::GATHERS: [tokens][chunks][PLANE_BYTES]
  __nv_bfloat16* out;        // SWIGLU: planes [row tiles / 2][rows][PLANE_BYTES]; else [rows][columns]
  const int32_t* token_of_row;  // of the first product
  const int4* tiles;
  const int32_t* tile_count;
  int chunks, row_tiles, columns;
  int64_t rows;
  float alpha, limit, shift;  // of the activation; 1, infinity and 0 make it SwiGLU with plain SiLU
};

// Two E8M0 bytes 2^(s - 127), kept as the exponents of 2^(s - 1) by layout.py, as pairs of equal bf16.
__device__ __forceinline__ void scale_pairs(uint32_t scales, uint32_t (&factor)[2]) {
  halves(__byte_perm(scales, 0, 0x4140) << 7, factor);
}

// Four E2M1 pairs of a word as bf16 pairs times 2^-126: sign, exponent and mantissa bits go where bf16 has them.
// layout.py orders the bits so that few shifts and masks bring them there, and few shifts go right: a left shift is a
// multiplication, whose unit has time; masks and right shifts share the unit that limits decoding.
__device__ __forceinline__ void expand_word(uint32_t q, uint32_t (&pairs)[4]) {
  constexpr uint32_t ALL = 0x81C081C0, SIGN = 0x80008000, REST = 0x01C001C0;
  pairs[0] = q & ALL;
  pairs[1] = (q << 3) & ALL;
  pairs[2] = ((q & 0x40074007) * 66) & ALL;  // << 6 and << 1 at once: no two of these bits meet
  pairs[3] = ((q >> 3) & REST) | ((q << 2) & SIGN);
}

// This thread's part of 64 x 64 weights: 16 bytes become four A fragments of the matrix instruction.
__device__ __forceinline__ void expand(const uint8_t* chunk, int thread, uint32_t* a) {
  const uint4 q = *reinterpret_cast<const uint4*>(chunk + 16 * thread);
  const uint32_t scales = *reinterpret_cast<const uint16_t*>(chunk + VALUE_BYTES + 2 * (thread >> 1));
  const uint32_t words[4] = {q.x, q.y, q.z, q.w};
  uint32_t factor[2];
  scale_pairs(scales, factor);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t pairs[4];
    expand_word(words[step], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[4 * step + i] = multiply(pairs[i], factor[i & 1]);
  }
}

// REGISTERS: what a multiplying thread gets of those that the copying warpgroup gives up; 0 where all keep their share
// and a single warp copies.
template <int ROW_GROUPS_, int SPLIT_, int STEP_, int TOKENS_, int STAGES_, int BLOCKS_, int REGISTERS_ = 0>
struct Shape {
  static constexpr int ROW_GROUPS = ROW_GROUPS_, SPLIT = SPLIT_, STEP = STEP_, TOKENS = TOKENS_, STAGES = STAGES_;
  static constexpr int BLOCKS = BLOCKS_, REGISTERS = REGISTERS_;
  static constexpr int GROUPS = ROW_GROUPS * SPLIT, THREADS = GROUPS * 128 + (REGISTERS ? 128 : 32);
  static constexpr bool GATHERS = TOKENS <= 48;
  static constexpr int CHUNKS = SPLIT * STEP;  // of one stage
  static constexpr int X_BYTES = CHUNKS * TOKENS * PLANE_BYTES, W_BYTES = ROW_GROUPS * CHUNKS * CHUNK_BYTES;
  static constexpr int SUM_BYTES = ROW_GROUPS * (SPLIT - 1) * TOKENS * 64 * 4;
  // With one chunk a step and few warpgroups to cover for each other, the next step's chunk is expanded while this one
  // is multiplied; with more chunks a step, that happens within the step.
  static constexpr bool AHEAD = STEP == 1 && GROUPS * BLOCKS < 4;
  // Activations first: their swizzle wants addresses that are multiples of 1024, for which 1008 bytes are spare.
  static constexpr int SHARED_BYTES =
      1024 + STAGES * (X_BYTES + W_BYTES + 16) + SUM_BYTES + GROUPS * 4 * STAGING_BYTES;
};

template <class S>
struct Ring {
  uint32_t x, full;
  const uint8_t* w;
  int stage = 0, parity = 0;
  __device__ Ring(uint8_t* base)
      : x(shared_address(base)), full(shared_address(base + S::STAGES * (S::X_BYTES + S::W_BYTES))),
        w(base + S::STAGES * S::X_BYTES) {}
  __device__ uint32_t full_bar() const { return full + 8 * stage; }
  __device__ uint32_t empty_bar(int of) const { return full + 8 * (S::STAGES + of); }
  __device__ void next() {
    if (++stage == S::STAGES) stage = 0, parity ^= 1;
  }
};

// The matrix instruction's width for a tile's tokens; each is code of its own, so there are fewer of them around 48.
__device__ __forceinline__ int matrix_tokens(int tokens) {
  return tokens > 32 && tokens <= 64 ? (tokens + 15) / 16 * 16 : (tokens + 7) / 8 * 8;
}
template <int N>
__host__ __device__ constexpr int next_width() { return N >= 32 && N < 64 ? N + 16 : N + 8; }

struct Tile {
  int4 tokens;
  int row_tile;
};

// One tile's copies.
template <class S>
struct Copies {
  const uint8_t *w, *x;
  int64_t w_stride, x_stride;
  int chunks, groups, x_bytes;
  uint64_t once, keep;

  __device__ Copies(const Gemm& g, const Tile& tile, uint64_t once, uint64_t keep)
      : w_stride(int64_t{g.chunks} * CHUNK_BYTES), x_stride(g.rows * PLANE_BYTES), chunks(g.chunks),
        groups(min(S::ROW_GROUPS, g.row_tiles - tile.row_tile)),
        x_bytes(matrix_tokens(tile.tokens.z) * PLANE_BYTES), once(once), keep(keep) {
    w = g.weight + (int64_t{tile.tokens.x} * g.row_tiles + tile.row_tile) * w_stride;
    x = g.x + int64_t{tile.tokens.y} * PLANE_BYTES;
  }
  __device__ int chunks_at(int chunk) const { return min(S::CHUNKS, chunks - chunk); }
  // `more_bytes` come to this stage besides, by bulk copies too.
  __device__ void weights(const Ring<S>& ring, int chunk, int more_bytes) const {
    const int here = chunks_at(chunk);
    barrier_expect(ring.full_bar(), here * groups * CHUNK_BYTES + more_bytes);
    for (int r = 0; r < groups; ++r)
      bulk_copy(shared_address(ring.w) + ring.stage * S::W_BYTES + r * S::CHUNKS * CHUNK_BYTES,
                w + r * w_stride + int64_t{chunk} * CHUNK_BYTES, here * CHUNK_BYTES, ring.full_bar(), once);
  }
  __device__ void planes(const Ring<S>& ring, int chunk) const {
    for (int k = 0; k < chunks_at(chunk); ++k)
      bulk_copy(ring.x + ring.stage * S::X_BYTES + k * S::TOKENS * PLANE_BYTES, x + (chunk + k) * x_stride, x_bytes,
                ring.full_bar(), keep);
  }
};

// One tile's activations from the tokens' rows, by the copying warp: four rows at once, 16 bytes a lane. Nothing in `copy`
// waits for anything, or one copy would wait for the one before.
template <class S>
struct GatheredRows {
  static constexpr int FOURS = S::TOKENS / 4;
  const uint8_t* x;
  int width, row, from[FOURS];  // this lane's first row, and of each of its rows the place in x, in 16 bytes
  uint32_t to;

  __device__ GatheredRows(const Gemm& g, const Tile& tile) : x(g.x), width(matrix_tokens(tile.tokens.z)) {
    const int lane = threadIdx.x & 31, vector = lane & 7;
    row = lane / 8;
    to = row * PLANE_BYTES + (vector ^ row) * 16;
#pragma unroll
    for (int j = 0; j < FOURS; ++j)  // the last row again behind the last
      from[j] = g.token_of_row[tile.tokens.y + min(j * 4 + row, tile.tokens.z - 1)] * g.chunks * 8 + vector;
  }
  __device__ void copy(const Ring<S>& ring, int chunk, int chunks) const {
    for (int k = 0; k < chunks; ++k) {
      const uint32_t first = ring.x + ring.stage * S::X_BYTES + k * S::TOKENS * PLANE_BYTES + to;
#pragma unroll
      for (int j = 0; j < FOURS; ++j)
        copy_16_if(j * 4 + row < width, (first ^ (j & 1) * 64) + j * 4 * PLANE_BYTES,
                   x + (int64_t{from[j]} + (chunk + k) * 8) * 16);
    }
  }
};

// This block's tile that is `later` tiles behind the one of that index; the last one again behind the last.
template <class S>
__device__ __forceinline__ Tile later_tile(const Gemm& g, int index, int later, int tile_number, int row_blocks) {
  const int wanted = min(index + later * static_cast<int>(gridDim.x), tile_number - 1);
  return {g.tiles[wanted / row_blocks], wanted % row_blocks * S::ROW_GROUPS};
}

// The copying warp's walk over all tiles of this block, for the first product. What it needs to know of a tile is asked
// for while the tiles before it are copied, or no weights would be on their way meanwhile.
template <class S>
__device__ void produce_gathered(const Gemm& g, Ring<S> ring, int row_blocks) {
  const uint64_t once = leave_first();
  const bool copies_weights = threadIdx.x == S::GROUPS * 128;
  wait_for_previous_kernel();
  const int tile_number = *g.tile_count * row_blocks;
  if (static_cast<int>(blockIdx.x) >= tile_number) return;
  Tile tile = later_tile<S>(g, blockIdx.x, 0, tile_number, row_blocks);
  Tile next = later_tile<S>(g, blockIdx.x, 1, tile_number, row_blocks);
  GatheredRows<S> rows(g, tile);
  for (int index = blockIdx.x; index < tile_number; index += gridDim.x) {
    const Tile after = later_tile<S>(g, index, 2, tile_number, row_blocks);
    const GatheredRows<S> next_rows(g, next);
    const Copies<S> copies(g, tile, once, once);
    for (int chunk = 0; chunk < g.chunks; chunk += S::CHUNKS, ring.next()) {
      barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
      if (copies_weights) copies.weights(ring, chunk, 0);
      __syncwarp();
      rows.copy(ring, chunk, copies.chunks_at(chunk));
      arrive_when_copied(ring.full_bar());
    }
    tile = next, next = after, rows = next_rows;
  }
}

// The copying thread's walk over all tiles of this block, with activations in planes. Where the tiles are known before the
// kernel before this one has ended, the first tile's weights fill the ring until then.
template <class S, bool SWIGLU>
__device__ void produce_planes(const Gemm& g, Ring<S> ring, int row_blocks) {
  const uint64_t once = leave_first(), keep = leave_last();
  if constexpr (SWIGLU) wait_for_previous_kernel();
  const int tile_number = *g.tile_count * row_blocks;
  if (static_cast<int>(blockIdx.x) >= tile_number) return;
  const auto weights = [&](const Copies<S>& of, const Ring<S>& at, int chunk) {
    of.weights(at, chunk, of.chunks_at(chunk) * of.x_bytes);
  };
  int chunk = 0;
  Tile tile = later_tile<S>(g, blockIdx.x, 0, tile_number, row_blocks);
  if constexpr (!SWIGLU) {
    const Copies<S> first(g, tile, once, keep);
    Ring<S> filled = ring;
    for (int i = 0; i < S::STAGES && i * S::CHUNKS < g.chunks; ++i, filled.next()) weights(first, filled, i * S::CHUNKS);
    wait_for_previous_kernel();
    for (int i = 0; i < S::STAGES && chunk < g.chunks; ++i, chunk += S::CHUNKS, ring.next()) first.planes(ring, chunk);
  }
  for (int index = blockIdx.x; index < tile_number; index += gridDim.x, chunk = 0) {
    const Tile next = later_tile<S>(g, index, 1, tile_number, row_blocks);  // asked for early, as above
    const Copies<S> copies(g, tile, once, keep);
    for (; chunk < g.chunks; chunk += S::CHUNKS, ring.next()) {
      barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
      weights(copies, ring, chunk);
      copies.planes(ring, chunk);
    }
    tile = next;
  }
}

// Multiply one tile: leaves this warpgroup's sums in `sum` and the ring behind the tile's last chunk. GATHERED says that
// activations were not copied in bulk, so that the matrix instruction sees them behind a fence only.
template <class S, bool GATHERED, int N>
__device__ __forceinline__ void multiply_tile(const Gemm& g, Ring<S>& ring, int group, int split, float (&sum)[N / 2]) {
  const int thread = threadIdx.x & 127;
  const int first_part = split * S::STEP;
  uint32_t even[16], odd[16];
  const auto load = [&](uint32_t (&a)[16], int part) {
    expand(ring.w + ring.stage * S::W_BYTES + (group * S::CHUNKS + part) * CHUNK_BYTES, thread, a);
  };
  const auto issue = [&](uint32_t (&a)[16], int part) {
    const uint64_t b = wgmma_descriptor(ring.x + ring.stage * S::X_BYTES + part * S::TOKENS * PLANE_BYTES);
    pin(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) Wgmma<N>::run(sum, a + 4 * k, b + 2 * k);  // 16 columns are 32 bytes
    wgmma_commit();
  };
  const auto wait = [&] {
    barrier_wait(ring.full_bar(), ring.parity);
    if constexpr (GATHERED) fence_for_matrix_instruction();
  };
  // By every lane: each has read for itself, and ptxas leaves out a __syncwarp before one lane's arrival.
  const auto release = [&](int stage) { barrier_arrive(ring.empty_bar(stage)); };
  ring.stage = uniform(ring.stage), ring.parity = uniform(ring.parity);
  if constexpr (!S::AHEAD) {
    for (int first = 0; first < g.chunks; first += S::CHUNKS) {
      wait();
      if (S::CHUNKS == 1 || first + first_part + S::STEP <= g.chunks) {
        load(even, first_part);
#pragma unroll
        for (int u = 0; u < S::STEP; ++u) {
          issue(u & 1 ? odd : even, first_part + u);
          if (u + 1 < S::STEP) load(u & 1 ? even : odd, first_part + u + 1);
          wgmma_wait<0>();
        }
      } else {  // the tile's last step has fewer chunks
        for (int part = first_part; first + part < g.chunks && part < first_part + S::STEP; ++part) {
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
      issue(now, first_part);
      const int stage = ring.stage;
      ring.next();
      if (more) {
        wait();
        load(then, first_part);
      }
      wgmma_wait<0>();
      release(stage);
    };
    static_assert(S::SPLIT == 1);
    wait();
    load(even, first_part);
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

// What a warpgroup does that has none of a tile's rows.
template <class S>
__device__ __forceinline__ void pass_tile(const Gemm& g, Ring<S>& ring) {
  for (int chunk = 0; chunk < g.chunks; chunk += S::CHUNKS, ring.next()) {
    barrier_wait(ring.full_bar(), ring.parity);
    barrier_arrive(ring.empty_bar(ring.stage));
  }
}

__device__ __forceinline__ float activation(float gate, float up, const Gemm& g) {
  gate = smaller(gate, g.limit), up = larger(smaller(up, g.limit), -g.limit);
  return __fdividef((up + g.shift) * gate, 1.0f + __expf(-g.alpha * gate));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// In a 16 x 8 block of sums a thread holds rows l/4 and l/4 + 8, tokens 2(l%4) and one more. Four blocks of 8 x 8 go
// through the warp's part of shared memory, transposed: each token's eight columns leave as 16 bytes. For the first product
// rows 0-7 are gates and 8-15 their ups, so the four blocks are 32 tokens; for the second, two blocks are 16 tokens' 32
// bytes, a whole sector of memory: halves cost as much.
template <int N>
__device__ __forceinline__ void store_swiglu(const Gemm& g, const Tile& tile, int group, const float (&sum)[N / 2],
                                             const float (&bias)[2], uint8_t* staging) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int row_tile = tile.row_tile + group, vector = (row_tile & 1) * 4 + warp;  // of the plane's eight, see layout.py
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

// Warpgroups that store their results one after the other come to their tiles' ends at different times from then on, so that
// the matrix units have work meanwhile. The first tile costs waiting, so it is for many tiles; and no warpgroup may come
// to its next turn before the others had this one, for which the ring must be shorter than a tile.
template <class S>
__device__ __forceinline__ bool take_turns(const Gemm& g, int tile_number) {
  constexpr int MANY_TILES = 4;  // of a block
  return S::AHEAD && g.chunks > S::STAGES && tile_number > MANY_TILES * static_cast<int>(gridDim.x);
}
__device__ __forceinline__ void begin_turn(int group) {
  if (group > 0) named_barrier(group, 256);
}
template <class S>
__device__ __forceinline__ void end_turn(int group) {
  if (group + 1 < S::GROUPS) named_barrier_arrive(group + 1, 256);
}

// Add up the sums of the warpgroups that share rows, always in the same order; true for the one that has the result.
template <class S, int N>
__device__ __forceinline__ bool combine(float (&sum)[N / 2], float* sums, int group, int split) {
  if constexpr (S::SPLIT > 1) {
    float* shared = sums + group * (S::SPLIT - 1) * S::TOKENS * 64 + (threadIdx.x & 127);
    if (split > 0) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) shared[((split - 1) * N / 2 + i) * 128] = sum[i];
    }
    named_barrier(1 + group, S::SPLIT * 128);
    if (split == 0) {
      for (int other = 0; other < S::SPLIT - 1; ++other) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sum[i] += shared[(other * N / 2 + i) * 128];
      }
    }
    named_barrier(1 + group, S::SPLIT * 128);
  }
  return split == 0;
}

template <class S, bool SWIGLU, int N>
__device__ __forceinline__ void consume(const Gemm& g, Ring<S>& ring, const Tile& tile, float* sums, bool turns) {
  uint8_t* staging = reinterpret_cast<uint8_t*>(sums) + S::SUM_BYTES + uniform(threadIdx.x >> 5) * STAGING_BYTES;
  const int warpgroup = uniform(threadIdx.x >> 7), thread = threadIdx.x & 127;
  const int group = warpgroup / S::SPLIT, split = warpgroup % S::SPLIT;
  float sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[i] = 0;
  const bool there = tile.row_tile + group < g.row_tiles;
  const float* from = g.bias + (int64_t{tile.tokens.x} * g.row_tiles + tile.row_tile + (there ? group : 0)) * 64;
  const int row = (thread >> 5) * 16 + (thread & 31) / 4;
  const float bias[2] = {from[row], from[row + 8]};  // before the long loop, to be here after it
  if (there) {
    multiply_tile<S, SWIGLU && S::GATHERS, N>(g, ring, group, split, sum);
  } else {
    pass_tile<S>(g, ring);
  }
  if (!combine<S, N>(sum, sums, group, split)) return;
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

// The matrix instruction's width is part of its name: choose the code for this tile's number of tokens.
template <class S, bool SWIGLU, int N>
__device__ __forceinline__ void consume_width(const Gemm& g, Ring<S>& ring, const Tile& tile, float* sums, bool turns,
                                              int width) {
  if constexpr (N >= S::TOKENS) {
    consume<S, SWIGLU, S::TOKENS>(g, ring, tile, sums, turns);
  } else {
    if (width <= N) {
      consume<S, SWIGLU, N>(g, ring, tile, sums, turns);
    } else {
      consume_width<S, SWIGLU, next_width<N>()>(g, ring, tile, sums, turns, width);
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
    // The second product's multipliers need not wait: what they read comes by copies that did, or was there before.
    if constexpr (SWIGLU) wait_for_previous_kernel();
    let_next_kernel_start();
    float* sums = reinterpret_cast<float*>(base + S::STAGES * (S::X_BYTES + S::W_BYTES + 16));
    const int tile_number = uniform(*g.tile_count) * row_blocks;
    if (static_cast<int>(blockIdx.x) >= tile_number) return;
    Tile tile = later_tile<S>(g, blockIdx.x, 0, tile_number, row_blocks);
    const bool turns = take_turns<S>(g, tile_number);
    for (int index = blockIdx.x; index < tile_number; index += gridDim.x) {
      const Tile next = later_tile<S>(g, index, 1, tile_number, row_blocks);  // asked for early here too
      tile.tokens.z = uniform(tile.tokens.z);
      consume_width<S, SWIGLU, 8>(g, ring, tile, sums, turns, matrix_tokens(tile.tokens.z));
      tile = next;
    }
  }
}

}  // namespace spark
