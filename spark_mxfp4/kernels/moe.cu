// The kernels' C doors for hopper.py: plain pointers and sizes, errors as CUDA's numbers.
#include "launch.cuh"
#include "layer.cuh"
#include "rows.cuh"
#include "shapes.cuh"

using namespace spark;

namespace {

#define SPARK_UNIT(number, ...) unit_##number,
constexpr Unit UNITS[] = {SPARK_SHAPES};
constexpr int UNIT_NUMBER = sizeof(UNITS) / sizeof(Unit);

}  // namespace

extern "C" {

int spark_shape_number() { return UNIT_NUMBER; }
int spark_shape_tokens(int shape) { return shape >= 0 && shape < UNIT_NUMBER ? UNITS[shape](nullptr, 0, 0, nullptr) : 0; }
const char* spark_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int spark_route(const Routing* r, const Gather* g, int fused_pairs, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const bool fused = r->pairs <= fused_pairs;
  const int shared = (ROUTE_WARPS * r->experts + ROUTE_WARPS + (fused ? r->pairs : 0)) * 4;
  if (fused) {
    if (const cudaError_t error = allow_shared(route_and_gather, shared)) return error;
    return launch(route_and_gather, dim3(min((r->pairs + 3) / 4, 128)), ROUTE_THREADS, shared, stream, *r, *g);
  }
  if (const cudaError_t error = allow_shared(route_only, shared)) return error;
  if (const cudaError_t error = launch(route_only, dim3(1), ROUTE_THREADS, shared, stream, *r)) return error;
  return launch(gather, dim3(r->pairs), 128, 0, stream, static_cast<const int32_t*>(r->row_of_pair), r->top_k, *g);
}

int spark_gemm(const Gemm* g, int shape, int swiglu, int processors, void* stream) {
  if (shape < 0 || shape >= UNIT_NUMBER) return cudaErrorInvalidValue;
  return UNITS[shape](g, swiglu, processors, static_cast<cudaStream_t>(stream));
}

int spark_layer_chunks(int rows) { return layer_chunks(rows); }
int spark_layer(const Layer* l, int rows, int processors, void* stream) {
  return layer(l, rows, processors, static_cast<cudaStream_t>(stream));
}

int spark_reduce(const void* output, const int32_t* row_of_pair, const float* shares, void* result, int tokens,
                 int top_k, int columns, void* stream) {
  const int vectors = columns / 8;
  return launch(reduce, dim3(tokens, (vectors + 127) / 128), 128, 0, static_cast<cudaStream_t>(stream),
                static_cast<const uint4*>(output), row_of_pair, shares, static_cast<uint4*>(result), top_k, vectors);
}

}  // extern "C"
