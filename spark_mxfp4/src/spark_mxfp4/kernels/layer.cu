// The C interface of the kernels that compute a whole layer; hopper.py chooses the shape. SPARK_SMALL leaves out shapes
// that need more shared memory than compute capability 12.1 has.
#include "launch.cuh"
#include "layer.cuh"

namespace spark {

#define SPARK_FITS(number, ...) \
  static_assert(LAYER_SHARED<Shape<__VA_ARGS__>> + LAYER_STATIC <= SMALL_SHARED);
SPARK_SMALL_LAYERS(SPARK_FITS)
#undef SPARK_FITS

}  // namespace spark

extern "C" int spark_layer(const spark::Layer* l, int shape, int processors, void* stream) {
  const auto run = [&](auto s) -> cudaError_t {
    using S = decltype(s);
    const auto kernel = spark::whole_layer<S>;
    if (const cudaError_t error = spark::allow_shared(kernel, spark::LAYER_SHARED<S>)) return error;
    return spark::launch_together(kernel, dim3(processors * S::BLOCKS), spark::LAYER_THREADS<S>, spark::LAYER_SHARED<S>,
                                  static_cast<cudaStream_t>(stream), *l);
  };
  return spark::with_shape(shape, run, cudaErrorInvalidValue);
}
