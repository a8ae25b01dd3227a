// The C interface of the router's kernels, for router.py.
#include <cuda_runtime.h>

#include "launch.cuh"
#include "router.cuh"

using namespace spark;

namespace {

constexpr int NO_FIT = -1;

template <class Kernel, class... Args>
int start(Kernel kernel, int blocks, int cluster, int threads, int bytes, cudaStream_t stream, Args... args) {
  if (cluster > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (cluster == 0) return launch(kernel, dim3(blocks), threads, bytes, stream, args...);
  const cudaError_t error = launch_clusters(kernel, blocks, cluster, threads, bytes, stream, args...);
  return error == cudaSuccess ? 0 : NO_FIT;  // the device may have no room for such a cluster
}

template <int UNITS, int TILES>
int by_cluster(const Router& r, cudaStream_t stream) {
  constexpr int WARPS = 32;
  const int blocks = (r.experts + 8 * TILES - 1) / (8 * TILES);
  if (blocks > 16 || r.columns > UNITS * WARPS * 32) return NO_FIT;
  using Few = OneCluster<1, UNITS, TILES, WARPS>;
  using Many = OneCluster<2, UNITS, TILES, WARPS>;
  if (r.tokens <= 8) return start(route_by_cluster<Few>, blocks, blocks, WARPS * 32, Few::bytes(blocks), stream, r);
  return start(route_by_cluster<Many>, blocks, blocks, WARPS * 32, Many::bytes(blocks), stream, r);
}

template <int UNITS>
int by_ticket(const Router& r, cudaStream_t stream) {
  constexpr int WARPS = 12;
  const int units = (r.columns + 31) / 32, slices = (units + WARPS * UNITS - 1) / (WARPS * UNITS);
  const int blocks = (r.experts + 7) / 8 * slices;
  using Few = ByTicket<1, UNITS, WARPS>;
  using Many = ByTicket<2, UNITS, WARPS>;
  if (r.tokens <= 8) return start(route_by_ticket<Few>, blocks, 0, WARPS * 32, Few::bytes(), stream, r, slices);
  return start(route_by_ticket<Many>, blocks, 0, WARPS * 32, Many::bytes(), stream, r, slices);
}

using Runner = int (*)(const Router&, cudaStream_t);
constexpr Runner RUNNERS[] = {
    // router.py refers to the variants by these numbers.
    by_cluster<3, 1>,  // 0: up to 3,072 columns and 128 experts; 16 blocks for 128
    by_cluster<3, 2>,  // 1: up to 3,072 columns and 256 experts; 8 blocks for 128
    by_cluster<6, 1>,  // 2: up to 6,144 columns and 128 experts
    by_ticket<1>,      // 3: 128 blocks for 128 experts of 2,880 columns
    by_ticket<2>,      // 4: 64 blocks
    by_ticket<4>,      // 5: 32 blocks
    by_ticket<8>,      // 6: 16 blocks
};

}  // namespace

extern "C" {
int spark_router_variant_number() { return sizeof(RUNNERS) / sizeof(Runner); }
// Returns 0; -1 if the variant does not support the size or the device; or CUDA's error.
int spark_router(const Router* r, int variant, void* stream) {
  if (r->tokens > ROUTER_TOKENS || r->experts > ROUTER_EXPERTS || r->top_k > ROUTER_TOP_K) return NO_FIT;
  return RUNNERS[variant](*r, static_cast<cudaStream_t>(stream));
}
const char* spark_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
