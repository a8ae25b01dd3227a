// The grouped products on a CPU, with moe.cu's own doors.
#include "runtime.h"
#include "warp.cuh"
#include "wgmma.cuh"

namespace spark {

alignas(1024) uint8_t raw[cpu::MOST_BYTES];

}  // namespace spark

void cpu::begin_block(int) {
  spark::forget_blocks(sizeof(spark::raw));
  spark::products.clear();
}

#include "moe.cu"
#include "grouped.cu"

namespace spark {

#define SPARK_UNIT(number, ...)                                                        \
  int unit_##number(const Gemm* g, int swiglu, int processors, cudaStream_t stream) { \
    return run_unit<Shape<__VA_ARGS__>>(g, swiglu, processors, stream);                \
  }
SPARK_SHAPES
#undef SPARK_UNIT

// The kernel of a whole layer has a library of its own, layer.cpp.
int layer(const Layer*, int, int, cudaStream_t) { return cudaErrorInvalidValue; }
int layer_chunks(int) { return 0; }
int layer_tokens(int) { return 0; }

}  // namespace spark

// How often a warpgroup has waited for its turn since the last time, in all blocks.
extern "C" int count_turns() { return std::exchange(spark::named_waits, 0) / 128; }
