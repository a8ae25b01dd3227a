// Code that the grouped products and the whole-layer kernel share: the ring buffer, the copies of a tile, and the
// activation.
#pragma once
#include "arguments.cuh"
#include "shapes.cuh"

namespace spark {

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

// The width of the matrix instruction for a tile of `tokens` tokens. The code is compiled for each width, so there are
// fewer widths between 32 and 64: multiples of 16 instead of 8.
__device__ __forceinline__ int matrix_tokens(int tokens) {
  return tokens > 32 && tokens <= 64 ? (tokens + 15) / 16 * 16 : (tokens + 7) / 8 * 8;
}
template <int N>
__host__ __device__ constexpr int next_width() { return N >= 32 && N < 64 ? N + 16 : N + 8; }

struct Tile {
  int4 tokens;
  int row_tile;
};

// The bulk copies of one tile: its weights, and its activations if they are in planes.
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
  // Copies the weights of a stage. The stage's barrier also waits for `more_bytes` of other bulk copies.
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

__device__ __forceinline__ float activation(float gate, float up, const Gemm& g) {
  gate = smaller(gate, g.limit), up = larger(smaller(up, g.limit), -g.limit);
  return __fdividef((up + g.shift) * gate, 1.0f + __expf(-g.alpha * gate));
}

}  // namespace spark
