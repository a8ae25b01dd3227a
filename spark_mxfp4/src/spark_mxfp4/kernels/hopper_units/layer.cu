// The kernels that compute a whole layer; hopper.py says when which of them runs.
#include "../launch.cuh"
#include "../layer.cuh"

namespace spark {

int layer_chunks(int rows) {
  return with_shape(rows, [](auto shape) { return decltype(shape)::CHUNKS; }, 0);
}

int layer(const Layer* l, int rows, int processors, cudaStream_t stream) {
  const auto run = [&](auto shape) -> cudaError_t {
    using S = decltype(shape);
    const auto kernel = whole_layer<S>;
    if (const cudaError_t error = allow_shared(kernel, S::SHARED_BYTES)) return error;
    return launch_together(kernel, dim3(processors * S::BLOCKS), LAYER_THREADS<S>, S::SHARED_BYTES, stream, *l);
  };
  return with_shape(rows, run, cudaErrorInvalidValue);
}

}  // namespace spark
