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
#define SPARK_NUMBER 0
#include "grouped.cu"
#undef SPARK_NUMBER
#include "grouped.cu"

// How often a warpgroup has waited for its turn since the last time, in all blocks.
extern "C" int count_turns() { return std::exchange(spark::named_waits, 0) / 128; }
