// The attention kernels on a CPU, through the same structures as attention.cu's doors.
#include "runtime.h"
#include "warp.cuh"
#include "norm.cuh"
#include "attention.cuh"  // the test puts a copy beside this folder's headers

using namespace spark;

uint8_t spark::raw[1];  // of shared memory by address, which these kernels do not use
void cpu::begin_block(int) {}

template <int WARPS>
int run_attention(const Attention& a) {
  return cpu::run_grid({a.splits, a.tokens * a.key_heads}, 1, WARPS * 32, ATTENTION_BYTES<WARPS>, [&] { attend<WARPS>(a); });
}
extern "C" int attend_on_cpu(const Attention* a, int warps) {
  return warps == 8 ? run_attention<8>(*a) : run_attention<16>(*a);
}
extern "C" int rotate_on_cpu(const Rotation* r) {
  return cpu::run_grid({r->tokens, 1}, 1, 256, 0, [&] { rotate_and_store(*r); });
}
extern "C" int normalise_on_cpu(const Norm* n, const Peers* p) {
  const auto kernel = p->ranks > 1 ? add_and_normalise<true> : add_and_normalise<false>;
  return cpu::run_grid({n->tokens, 1}, 1, NORM_THREADS, 4 * NORM_THREADS / 32, [&] { kernel(*n, *p); });
}
