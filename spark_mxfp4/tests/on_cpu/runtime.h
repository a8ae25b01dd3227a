// The part of CUDA's runtime that starts kernels: their launches run here, one block after the other, and blocks of
// clusters at once.
//
// Who includes this says what each block finds, by cpu::begin_block.
#pragma once
#include "cuda_bf16.h"

#define __grid_constant__
#define __host__
#define __shared__
#undef blockIdx
#undef gridDim
#undef blockDim
#define blockIdx (Index{cpu::first_block.x + cpu::current->block, cpu::first_block.y})
inline Index gridDim, blockDim;

using cudaStream_t = void*;
using cudaError_t = int;  // or how many threads wait for ever
enum { cudaSuccess, cudaErrorInvalidValue };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum {
  cudaLaunchAttributeIgnore,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeClusterDimension
};
struct dim3 {
  int x = 1, y = 1;
  dim3() = default;
  explicit dim3(int x, int y = 1) : x(x), y(y) {}
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed, cooperative;
    struct { int x, y, z; } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  int dynamicSmemBytes, numAttrs;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
};

namespace cpu {

constexpr int MOST_BYTES = 232448;  // of a block, compute capability 9.0
inline int bytes_of_block = MOST_BYTES;
inline Index first_block;  // of those that run
void begin_block(int bytes);

// Returns 0, or how many threads wait for ever.
inline int run_grid(Index grid, int at_once, int threads, int bytes, const std::function<void()>& kernel) {
  gridDim = grid, blockDim = {threads};
  for (int x = 0; x < grid.x; x += at_once) {  // blocks of all y in turn, so that they cannot share a counter
    for (int y = 0; y < grid.y; ++y) {
      first_block = {x, y};
      begin_block(bytes);
      if (const int stuck = launch(at_once, threads, bytes, kernel)) return stuck;
    }
  }
  return 0;
}
template <class... Parameters, class... Arguments>
int run(void (*kernel)(Parameters...), int blocks, int threads, int bytes, const Arguments&... arguments) {
  return run_grid({blocks, 1}, 1, threads, bytes, [&] { kernel(arguments...); });
}

}  // namespace cpu

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  return bytes > cpu::bytes_of_block ? cudaErrorInvalidValue : cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "threads that wait for ever"; }
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const Index grid{config->gridDim.x, config->gridDim.y};
  cpu::cluster_size = 0;
  for (int i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cpu::cluster_size = config->attrs[i].val.clusterDim.x;
  return cpu::run_grid(grid, cpu::cluster_size > 0 ? grid.x : 1, config->blockDim.x, config->dynamicSmemBytes,
                       [&] { kernel(arguments...); });
}

extern "C" inline __attribute__((used)) void choose_bytes_of_block(int bytes) { cpu::bytes_of_block = bytes; }
