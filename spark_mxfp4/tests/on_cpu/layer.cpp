// The kernels of a layer of few tokens on a CPU, behind the doors that hopper.py opens.
#include "warp.cuh"
#include "instructions.cuh"

#define __grid_constant__
#define __host__
using cudaStream_t = void*;

namespace spark {

constexpr int MOST_BLOCKS = 48, BLOCK_BYTES = 256 << 10;
inline int bytes_of_block = BLOCK_BYTES;
alignas(1024) uint8_t raw[MOST_BLOCKS * BLOCK_BYTES];

struct Barriers {
  uint64_t rows_full[8], grid_ready, sorted;
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
  static_assert(LAYER_SHARED<S> <= BLOCK_BYTES);
  if (LAYER_SHARED<S> + LAYER_STATIC > bytes_of_block || blocks > MOST_BLOCKS) return 1;
  forget_blocks(size_t(blocks) * BLOCK_BYTES);
  const int stuck = cpu::launch(blocks, LAYER_THREADS<S>, 0, [&] { whole_layer<S>(l); });
  return stuck + static_cast<int>(spins > MOST_SPINS);
}

}  // namespace

extern "C" {

void limit_bytes(int bytes) { bytes_of_block = bytes; }
int spark_sort(const Routing* r, const Ordering* o, int, void*) {
  // With fewer pairs the second block would have none; within a GB10's limits there is but one.
  cpu::cluster_size = r->pairs > 1024 && bytes_of_block > SMALL_SHARED ? 2 : 1;
  const int others = o->ordered == nullptr ? 0 : 2 * cpu::cluster_size;
  const int bytes = ((ROUTE_WARPS + cpu::cluster_size) * r->experts + ROUTE_WARPS) * 4;
  const int stuck = cpu::launch(cpu::cluster_size + others, ROUTE_THREADS, bytes, [&] { sort_pairs(*r, *o); });
  cpu::cluster_size = 0;
  return stuck;
}
int spark_planes(const Ordering* o, const Routing* r, int64_t rows, void*) {
  const int threads = (o->chunks * 8 + 31) / 32 * 32;
  return cpu::launch(o->tokens, threads, 0, [&] { write_planes(*o, r->row_of_pair, r->top_k, rows); });
}
int spark_layer(const Layer* l, int number, int blocks, void*) {
  return with_shape(number, [&](auto shape) { return run<decltype(shape)>(*l, blocks); }, 1);
}

}
