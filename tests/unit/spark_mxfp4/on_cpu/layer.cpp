// The kernels of a layer of few tokens on a CPU, behind the doors that hopper.py opens.
#include "warp.cuh"
#include "instructions.cuh"

#define __shared__ static  // of the one block that sorts; test_layer.py gives each block of the other kernel its own
#define __grid_constant__
#define __host__
using cudaStream_t = void*;

namespace spark {

constexpr int MOST_BLOCKS = 4, BLOCK_BYTES = 256 << 10;
alignas(1024) uint8_t raw[MOST_BLOCKS * BLOCK_BYTES];
int memory[64 << 10];

struct Barriers {
  uint64_t brought[8], grid_ready;
};
template <class T>
T& of_block() {
  static T all[MOST_BLOCKS];
  return all[cpu::current->block];
}

}  // namespace spark

#include "layer.cuh"
#include "rows.cuh"

using namespace spark;

namespace {

template <class S>
int run(const Layer& l, int blocks) {
  static_assert(S::SHARED_BYTES <= BLOCK_BYTES);
  std::memset(raw, 0xFF, sizeof(raw));
  barriers.clear(), named_barriers.clear(), spins = 0, blocks_arrived = 0;
  int stuck = cpu::launch(blocks, LAYER_THREADS<S>, 0, [&] { whole_layer<S>(l); });
  for (const auto& [address, barrier] : barriers) stuck += barrier.waiting.size();
  return stuck + static_cast<int>(spins > MOST_SPINS);
}

}  // namespace

extern "C" {

void make_slow(int block, int warp) { cpu::slow_block = block, cpu::slow_warp = warp; }

int spark_layer_chunks(int rows) {
  return with_shape(rows, [](auto shape) { return decltype(shape)::CHUNKS; }, 0);
}
int spark_route(const Routing* r, const Gather* g, int, void*) {
  std::memset(memory, 0xFF, sizeof(memory));
  return cpu::launch(1, ROUTE_THREADS, 0, [&] { route_and_gather(*r, *g); });
}
int spark_layer(const Layer* l, int rows, int blocks, void*) {
  return with_shape(rows, [&](auto shape) { return run<decltype(shape)>(*l, blocks); }, 1);
}

}
