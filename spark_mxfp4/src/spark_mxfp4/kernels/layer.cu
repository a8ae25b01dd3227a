// The kernels that compute a whole layer; hopper.py says when which of them runs. SPARK_SMALL leaves out those that want
// more shared memory than 12.1 has.
#include "launch.cuh"
#include "layer.cuh"

namespace spark {

#define SPARK_FITS(number, ...) \
  static_assert(LAYER_SHARED<Shape<__VA_ARGS__>> + LAYER_STATIC <= SMALL_SHARED);
SPARK_SMALL_LAYERS(SPARK_FITS)
#undef SPARK_FITS

int layer_chunks(int shape) {
  return with_shape(shape, [](auto s) { return decltype(s)::CHUNKS; }, 0);
}
int layer_tokens(int shape) {
  return with_shape(shape, [](auto s) { return decltype(s)::TOKENS; }, 0);
}

int layer(const Layer* l, int shape, int processors, cudaStream_t stream) {
  const auto run = [&](auto s) -> cudaError_t {
    using S = decltype(s);
    const auto kernel = whole_layer<S>;
    if (const cudaError_t error = allow_shared(kernel, LAYER_SHARED<S>)) return error;
    return launch_together(kernel, dim3(processors * S::BLOCKS), LAYER_THREADS<S>, LAYER_SHARED<S>, stream, *l);
  };
  return with_shape(shape, run, cudaErrorInvalidValue);
}

}  // namespace spark
