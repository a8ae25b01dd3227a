// The shapes of the experts' kernels: tile size, ring buffer and registers. The kernel templates are instantiated for
// each SHAPE line. precompile.py parses these lines for hopper.py, the tests and the benchmarks. tuned.json refers to
// shapes by number.
//
// rows       height of a tile, in groups of 64 weight rows
// split      consumer warpgroups that share the columns of such a group
// step       chunks of 64 columns that each of these warpgroups takes from a stage
// tokens     width of a tile: the most tokens
// stages     stages of the ring buffer
// blocks     thread blocks per multiprocessor
// registers  registers of a consumer thread, after the producer warpgroup has released some of its own (setmaxnreg). If
//            omitted, the producer is a single warp and registers are not redistributed.
#pragma once
#include "format.cuh"

//         number, rows, split, step, tokens, stages, blocks, registers
#define SPARK_GROUPED(SHAPE)      \
  SHAPE(0, 4, 1, 5, 16, 3, 1)     \
  SHAPE(1, 4, 1, 5, 24, 3, 1)     \
  SHAPE(2, 3, 1, 4, 64, 3, 1)     \
  SHAPE(3, 3, 1, 3, 96, 3, 1)     \
  SHAPE(4, 3, 1, 2, 128, 4, 1)    \
  SHAPE(5, 3, 1, 1, 192, 6, 1, 152)

// Shapes of the whole-layer kernel. These need at most 99 KB of shared memory per block, the limit of compute
// capability 12.1.
#define SPARK_SMALL_LAYERS(SHAPE) \
  SHAPE(4, 1, 3, 3, 8, 3, 1)      \
  SHAPE(5, 3, 1, 3, 8, 4, 1)      \
  SHAPE(6, 2, 2, 2, 8, 4, 1)      \
  SHAPE(7, 3, 1, 2, 16, 5, 1)     \
  SHAPE(8, 3, 1, 2, 32, 4, 1)     \
  SHAPE(9, 2, 1, 1, 64, 6, 1)
// These need Hopper's larger shared memory.
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
  static constexpr int CHUNKS = SPLIT * STEP;  // per stage
  static constexpr int X_BYTES = CHUNKS * TOKENS * PLANE_BYTES, W_BYTES = ROW_GROUPS * CHUNKS * CHUNK_BYTES;
  static constexpr int SUM_BYTES = ROW_GROUPS * (SPLIT - 1) * TOKENS * 64 * 4;
  // Whether a consumer warpgroup expands the weights of the next stage while the current stage is multiplied. This
  // overlap is needed if a stage has one chunk per warpgroup and there are too few warpgroups to hide each other's
  // latency. With more chunks, expansion and multiplication overlap within a stage.
  static constexpr bool AHEAD = STEP == 1 && GROUPS * BLOCKS < 4;
  static constexpr int STAGING_BYTES = 4 * 8 * 8 * 2;  // buffer for a warp's results before they are stored
  // Activations come first, because their swizzle needs an address that is a multiple of 1024. The leading 1024 bytes
  // allow for this alignment. Each stage has two mbarriers of 8 bytes.
  static constexpr int SHARED_BYTES =
      1024 + STAGES * (X_BYTES + W_BYTES + 16) + SUM_BYTES + GROUPS * 4 * STAGING_BYTES;
};

}  // namespace spark
