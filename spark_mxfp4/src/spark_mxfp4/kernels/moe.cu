// The C interface of the kernels before and after the products, for hopper.py. Functions return CUDA error numbers. The
// interfaces of the products are in layer.cu and, for kernels that need Hopper's wgmma, in grouped.cu.
#include "launch.cuh"
#include "rows.cuh"

using namespace spark;

namespace {

#ifdef SPARK_SMALL
constexpr int ROUTE_BLOCKS = 1;
#else
constexpr int ROUTE_BLOCKS = 8;  // in the cluster that sorts; 8 is the largest portable size
#endif
constexpr int FEW_TO_SORT = 1024;  // most pairs that a single block sorts
constexpr int MANY_TOKENS = 1024;

}  // namespace

extern "C" {

const char* spark_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int spark_sort(const Routing* r, const Ordering* o, int processors, void* stream) {
  const int blocks = r->pairs > FEW_TO_SORT ? ROUTE_BLOCKS : 1;
  const int others = o->ordered == nullptr ? 0 : max(1, min(o->tokens, processors - blocks) / blocks) * blocks;
  const int shared = ((ROUTE_WARPS + blocks) * r->experts + ROUTE_WARPS) * 4;
  if (const cudaError_t error = allow_shared(sort_pairs, shared)) return error;
  return launch_clusters(sort_pairs, blocks + others, blocks, ROUTE_THREADS, shared, static_cast<cudaStream_t>(stream), *r, *o);
}

int spark_planes(const Ordering* o, const Routing* r, int64_t rows, void* stream) {
  const int width = o->chunks * 8, parts = (width + 255) / 256, threads = ((width + parts - 1) / parts + 31) / 32 * 32;
  return launch(write_planes, dim3(o->tokens, parts), threads, 0, static_cast<cudaStream_t>(stream), *o,
                static_cast<const int32_t*>(r->row_of_pair), r->top_k, rows);
}

int spark_reduce(const void* output, const int32_t* row_of_pair, const float* shares, void* result, int tokens,
                 int top_k, int columns, void* stream) {
  const int vectors = columns / 8;
  const auto run = [&](auto kernel, int at_once) {
    return launch(kernel, dim3((tokens + at_once - 1) / at_once, (vectors + 127) / 128), 128, 0,
                  static_cast<cudaStream_t>(stream), static_cast<const uint4*>(output), row_of_pair, shares,
                  static_cast<uint4*>(result), tokens, top_k, vectors);
  };
  // With few experts per token a thread has little to load. So it takes several tokens if there are enough tokens for
  // all multiprocessors.
  if (tokens < MANY_TOKENS) return run(reduce<1, 4>, 1);
  return top_k > 4 ? run(reduce<1, 8>, 1) : top_k > 2 ? run(reduce<2, 4>, 2) : run(reduce<4, 2>, 4);
}

}  // extern "C"
