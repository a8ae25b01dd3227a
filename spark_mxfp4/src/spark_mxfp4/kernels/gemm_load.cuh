// The producer of the grouped products: it copies the weights and activations of all tiles of the block into the ring.
#pragma once
#include "overlap.cuh"
#include "tiles.cuh"

namespace spark {

// Gathers a tile's activations from the tokens' rows. The producer warp copies four rows at once, 16 bytes per lane.
// The constructor loads all token numbers, so that `copy` can issue its copies without waiting for loads.
template <class S>
struct GatheredRows {
  static constexpr int FOURS = S::TOKENS / 4;
  const uint8_t* x;
  int width, row, from[FOURS];  // rows to copy; this lane's first row; offsets of its rows in x, in units of 16 bytes
  uint32_t to;

  __device__ GatheredRows(const Gemm& g, const Tile& tile) : x(g.x), width(matrix_tokens(tile.tokens.z)) {
    const int lane = threadIdx.x & 31, vector = lane & 7;
    row = lane / 8;
    to = row * PLANE_BYTES + (vector ^ row) * 16;
#pragma unroll
    for (int j = 0; j < FOURS; ++j)  // past the tile's last row, repeats the last row; those sums are not stored
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

// Returns the tile that this block computes `later` tiles after tile `index`. If there is none, returns the last tile.
template <class S>
__device__ __forceinline__ Tile later_tile(const Gemm& g, int index, int later, int tile_number, int row_blocks) {
  const int wanted = min(index + later * static_cast<int>(gridDim.x), tile_number - 1);
  return {g.tiles[wanted / row_blocks], wanted % row_blocks * S::ROW_GROUPS};
}

// The producer warp of the first product, for gathered activations. It loads the descriptions and token numbers of the
// next tiles while it copies the current one, so that copies are in flight during these loads.
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

// The producer thread, for activations in planes. In the second product the tiles are known before the preceding kernel
// has ended, so the producer first fills the ring with the first tile's weights, then waits for that kernel.
template <class S, bool SWIGLU>
__device__ void produce_planes(const Gemm& g, Ring<S> ring, int row_blocks) {
  const uint64_t once = leave_first(), keep = leave_last();
  if constexpr (SWIGLU) wait_for_previous_kernel();
  const int tile_number = *g.tile_count * row_blocks;
  if (static_cast<int>(blockIdx.x) >= tile_number) {
    wait_for_previous_kernel();  // needed even without a tile, see overlap.cuh
    return;
  }
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
    const Tile next = later_tile<S>(g, index, 1, tile_number, row_blocks);  // early, as above
    const Copies<S> copies(g, tile, once, keep);
    for (; chunk < g.chunks; chunk += S::CHUNKS, ring.next()) {
      barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
      weights(copies, ring, chunk);
      copies.planes(ring, chunk);
    }
    tile = next;
  }
}

}  // namespace spark
