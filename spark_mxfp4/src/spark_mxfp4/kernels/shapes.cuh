// The shapes of the experts' kernels by number. Each kernel is compiled from its line here; precompile.py reads the lines
// too, for hopper.py, the tests and the measurements. tuned.json chooses among the numbers.
//
// `rows` are tiles of 64 weight rows, `split` is the number of warpgroups that share the columns, `step` their chunks of 64
// columns in a stage, `tokens` the most tokens of a tile, `stages` those of the ring, `blocks` those of a multiprocessor.
// `registers` is what a multiplying thread gets of those that the copying warpgroup gives up; without it all keep their
// share and a single warp copies.
#pragma once
#include "format.cuh"

//         number, rows, split, step, tokens, stages, blocks, registers
#define SPARK_GROUPED(SHAPE)      \
  SHAPE(0, 4, 1, 5, 16, 3, 1)     \
  SHAPE(1, 4, 1, 5, 24, 3, 1)     \
  SHAPE(2, 4, 1, 3, 48, 4, 1)     \
  SHAPE(3, 3, 1, 3, 64, 4, 1)     \
  SHAPE(4, 2, 1, 1, 96, 6, 2)     \
  SHAPE(5, 3, 1, 1, 144, 9, 1, 152) \
  SHAPE(6, 3, 1, 1, 192, 6, 1, 152)

// The kernels of a whole layer. These need at most 99 KB of shared memory a block, 12.1's limit.
#define SPARK_SMALL_LAYERS(SHAPE) \
  SHAPE(4, 1, 3, 3, 8, 3, 1)      \
  SHAPE(5, 3, 1, 3, 8, 4, 1)      \
  SHAPE(6, 2, 2, 2, 8, 4, 1)      \
  SHAPE(7, 3, 1, 2, 16, 5, 1)     \
  SHAPE(8, 3, 1, 2, 32, 4, 1)     \
  SHAPE(9, 2, 1, 1, 64, 6, 1)
// These need Hopper's.
#define SPARK_LARGE_LAYERS(SHAPE) \
  SHAPE(1, 1, 2, 3, 8, 5, 2)      \
  SHAPE(2, 2, 1, 5, 8, 4, 2)      \
  SHAPE(3, 3, 1, 5, 8, 5, 1)

namespace spark {

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
  static constexpr int STAGING_BYTES = 4 * 8 * 8 * 2;  // a warp's results on their way to memory
  // Activations first: their swizzle wants addresses that are multiples of 1024, for which 1008 bytes are spare.
  static constexpr int SHARED_BYTES =
      1024 + STAGES * (X_BYTES + W_BYTES + 16) + SUM_BYTES + GROUPS * 4 * STAGING_BYTES;
};

}  // namespace spark
