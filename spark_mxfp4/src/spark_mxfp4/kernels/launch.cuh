// Kernel launches with programmatic dependent launch: a kernel can start before the preceding kernel has ended.
#pragma once

namespace spark {

template <class Kernel, class... Args>
cudaError_t launch_as(cudaLaunchAttribute other, Kernel kernel, dim3 grid, int threads, int shared, cudaStream_t stream,
                      Args... args) {
  cudaLaunchAttribute attributes[2]{{}, other};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = attributes, config.numAttrs = other.id == cudaLaunchAttributeIgnore ? 1 : 2;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) cudaGetLastError();  // clears the error, so that no later call returns it
  return error;
}

template <class Kernel, class... Args>
cudaError_t launch(Kernel kernel, dim3 grid, int threads, int shared, cudaStream_t stream, Args... args) {
  return launch_as({}, kernel, grid, threads, shared, stream, args...);
}

// A cooperative launch, for kernels whose blocks wait for each other: either all blocks run at once, or none does.
template <class Kernel, class... Args>
cudaError_t launch_together(Kernel kernel, dim3 grid, int threads, int shared, cudaStream_t stream, Args... args) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative, together.val.cooperative = 1;
  return launch_as(together, kernel, grid, threads, shared, stream, args...);
}

// A launch with clusters of `blocks` blocks, which can access each other's shared memory.
template <class Kernel, class... Args>
cudaError_t launch_clusters(Kernel kernel, int grid, int blocks, int threads, int shared, cudaStream_t stream, Args... args) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  return launch_as(cluster, kernel, dim3(grid), threads, shared, stream, args...);
}

template <class Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace spark
