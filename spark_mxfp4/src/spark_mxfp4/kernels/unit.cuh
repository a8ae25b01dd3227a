// One shape's kernels: a file that names its number as SPARK_NUMBER includes this.
#include "launch.cuh"
#include "shapes.cuh"

namespace spark {

template <int NUMBER>
struct ShapeOf;
#define SPARK_UNIT(number, ...)  \
  template <>                    \
  struct ShapeOf<number> {       \
    using type = Shape<__VA_ARGS__>; \
  };
SPARK_SHAPES
#undef SPARK_UNIT

#define SPARK_JOIN(a, b) a##b
#define SPARK_NAME(number) SPARK_JOIN(unit_, number)
int SPARK_NAME(SPARK_NUMBER)(const Gemm* g, int swiglu, int processors, cudaStream_t stream) {
  return run_unit<ShapeOf<SPARK_NUMBER>::type>(g, swiglu, processors, stream);
}

}  // namespace spark
