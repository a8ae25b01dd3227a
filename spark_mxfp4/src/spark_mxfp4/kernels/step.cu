// The C interface of the attention and norm kernels, for attention.py and norm.py. Functions return CUDA error numbers.
#include <cuda_runtime.h>

#include "attention.cuh"
#include "launch.cuh"
#include "norm.cuh"

using namespace spark;

extern "C" {
int spark_attention(const Attention* a, int warps, void* stream) {
  const dim3 blocks(a->splits, a->tokens * a->key_heads);
  const auto to = static_cast<cudaStream_t>(stream);
  return warps == 8 ? launch(attend<8>, blocks, 8 * 32, ATTENTION_BYTES<8>, to, *a)
                    : launch(attend<16>, blocks, 16 * 32, ATTENTION_BYTES<16>, to, *a);
}
int spark_rotation(const Rotation* r, void* stream) {
  return launch(rotate_and_store, dim3(r->tokens), 256, 0, static_cast<cudaStream_t>(stream), *r);
}
int spark_norm(const Norm* n, const Peers* p, void* stream) {
  const int bytes = 4 * NORM_THREADS / 32;
  return launch(p->ranks > 1 ? add_and_normalise<true> : add_and_normalise<false>, dim3(n->tokens), NORM_THREADS, bytes,
                static_cast<cudaStream_t>(stream), *n, *p);
}
const char* spark_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
