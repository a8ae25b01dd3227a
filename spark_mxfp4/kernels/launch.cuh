// Starting kernels so that each may begin while the one before it still ends (programmatic dependent launch).
#pragma once
#include "gemm.cuh"

namespace spark {

template <int TOGETHER = 0, class Kernel, class... Args>
cudaError_t launch(Kernel kernel, dim3 grid, int threads, int shared, cudaStream_t stream, Args... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = attributes, config.numAttrs = 1 + TOGETHER;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// For a kernel whose blocks wait for each other: all of them start, or none does.
template <class Kernel, class... Args>
cudaError_t launch_together(Kernel kernel, dim3 grid, int threads, int shared, cudaStream_t stream, Args... args) {
  return launch<1>(kernel, grid, threads, shared, stream, args...);
}

template <class Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Run one product, or, without one, return how many tokens a tile of this shape can have.
using Unit = int (*)(const Gemm*, int swiglu, int processors, cudaStream_t);

template <class S, bool SWIGLU>
cudaError_t run(const Gemm& g, int processors, cudaStream_t stream) {
  const auto kernel = grouped_gemm<S, SWIGLU>;
  if (const cudaError_t error = allow_shared(kernel, S::SHARED_BYTES)) return error;
  return launch(kernel, dim3(processors * S::BLOCKS), S::THREADS, S::SHARED_BYTES, stream, g);
}

template <class S>
int run_unit(const Gemm* g, int swiglu, int processors, cudaStream_t stream) {
  if (g == nullptr) return S::TOKENS;
  return swiglu ? run<S, true>(*g, processors, stream) : run<S, false>(*g, processors, stream);
}

}  // namespace spark
