// The kernels of a layer of few tokens on a CPU, one block each, behind the doors that hopper.py opens.
#include "warp.cuh"
#include "instructions.cuh"

#define __shared__ static  // of the one block; the test takes the word away where the array is declared elsewhere
#define __grid_constant__
#define __host__
using cudaStream_t = void*;
#include "layer.cuh"
#include "rows.cuh"

using namespace spark;

namespace spark {
alignas(1024) uint8_t raw[256 << 10];
int memory[64 << 10];
}  // namespace spark

namespace {

template <class S>
int run(const Layer& l) {
  static_assert(S::SHARED_BYTES <= sizeof(raw));
  std::memset(raw, 0xFF, sizeof(raw));
  barriers.clear(), named_barriers.clear(), spins = 0;
  int stuck = cpu::launch(1, LAYER_THREADS<S>, 0, [&] { whole_layer<S>(l); });
  for (const auto& [address, barrier] : barriers) stuck += barrier.waiting.size();
  return stuck + static_cast<int>(spins > 1000000);
}

}  // namespace

extern "C" {

int spark_layer_chunks(int rows) {
  return with_shape(rows, [](auto shape) { return decltype(shape)::CHUNKS; }, 0);
}
int spark_route(const Routing* r, const Gather* g, int, void*) {
  std::memset(memory, 0xFF, sizeof(memory));
  return cpu::launch(1, ROUTE_THREADS, 0, [&] { route_and_gather(*r, *g); });
}
int spark_layer(const Layer* l, int rows, int, void*) {
  return with_shape(rows, [&](auto shape) { return run<decltype(shape)>(*l); }, 1);
}

}
