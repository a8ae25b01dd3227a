// The grouped products, for hopper.py: their C interface or, if SPARK_NUMBER is defined, the kernels of the shape with
// that number. precompile.py compiles this file once for the interface and once for each shape, in parallel.
#include "gemm.cuh"
#include "launch.cuh"

namespace spark {

template <int NUMBER>
cudaError_t run_shape(const Gemm& g, bool swiglu, int processors, cudaStream_t stream);

#ifdef SPARK_NUMBER
template <class S>
cudaError_t run(const Gemm& g, bool swiglu, int processors, cudaStream_t stream) {
  const auto kernel = swiglu ? grouped_gemm<S, true> : grouped_gemm<S, false>;
  if (const cudaError_t error = allow_shared(kernel, S::SHARED_BYTES)) return error;
  return launch(kernel, dim3(processors * S::BLOCKS), S::THREADS, S::SHARED_BYTES, stream, g);
}
template <int NUMBER>
cudaError_t run_shape(const Gemm& g, bool swiglu, int processors, cudaStream_t stream) {
#define SPARK_CASE(number, ...) \
  if constexpr (number == NUMBER) return run<Shape<__VA_ARGS__>>(g, swiglu, processors, stream);
  SPARK_GROUPED(SPARK_CASE)
#undef SPARK_CASE
}
template cudaError_t run_shape<SPARK_NUMBER>(const Gemm&, bool, int, cudaStream_t);
#endif

}  // namespace spark

#ifndef SPARK_NUMBER
extern "C" int spark_gemm(const spark::Gemm* g, int shape, int swiglu, int processors, void* stream) {
#define SPARK_CASE(number, ...) \
  case number: return spark::run_shape<number>(*g, swiglu, processors, static_cast<cudaStream_t>(stream));
  switch (shape) {
    SPARK_GROUPED(SPARK_CASE)
    default: return cudaErrorInvalidValue;
  }
}
#endif
