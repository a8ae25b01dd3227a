// The C interface of the attention and norm kernels, for attention.py and norm.py. Functions return CUDA's error numbers.
#include <cuda_runtime.h>

#include "attention.cuh"
#include "norm.cuh"

using namespace spark;

namespace {

template <class Kernel, class Job>
int start(Kernel kernel, dim3 blocks, int threads, int bytes, void* stream, const Job& job) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = &attribute, config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, job);
  if (error != cudaSuccess) cudaGetLastError();  // resets it, so that a later caller does not get this error
  return static_cast<int>(error);
}

}  // namespace

extern "C" {
int spark_attention(const Attention* a, int warps, void* stream) {
  const dim3 blocks(a->splits, a->tokens * a->key_heads);
  return warps == 8 ? start(attend<8>, blocks, 8 * 32, ATTENTION_BYTES<8>, stream, *a)
                    : start(attend<16>, blocks, 16 * 32, ATTENTION_BYTES<16>, stream, *a);
}
int spark_rotation(const Rotation* r, void* stream) {
  return start(rotate_and_store, dim3(r->tokens), 256, 0, stream, *r);
}
int spark_norm(const Norm* n, void* stream) {
  return start(add_and_normalise, dim3(n->tokens), NORM_THREADS, 4 * NORM_THREADS / 32, stream, *n);
}
const char* spark_step_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
