// The C doors of the grouped products for hopper.py.
#include "launch.cuh"
#include "shapes.cuh"

using namespace spark;

namespace {

#define SPARK_UNIT(number, ...) unit_##number,
constexpr Unit UNITS[] = {SPARK_SHAPES};
#undef SPARK_UNIT
#define SPARK_UNIT(number, ...) Shape<__VA_ARGS__>::TOKENS,
constexpr int TOKENS[] = {SPARK_SHAPES};
#undef SPARK_UNIT
#define SPARK_UNIT(number, ...) Shape<__VA_ARGS__>::GATHERS,
constexpr bool GATHERS[] = {SPARK_SHAPES};
#undef SPARK_UNIT
constexpr int UNIT_NUMBER = sizeof(UNITS) / sizeof(Unit);

}  // namespace

extern "C" {

int spark_shape_number() { return UNIT_NUMBER; }
int spark_shape_tokens(int shape) { return shape >= 0 && shape < UNIT_NUMBER ? TOKENS[shape] : 0; }
int spark_shape_gathers(int shape) { return shape >= 0 && shape < UNIT_NUMBER && GATHERS[shape]; }

int spark_gemm(const Gemm* g, int shape, int swiglu, int processors, void* stream) {
  if (shape < 0 || shape >= UNIT_NUMBER) return cudaErrorInvalidValue;
  return UNITS[shape](g, swiglu, processors, static_cast<cudaStream_t>(stream));
}

}  // extern "C"
