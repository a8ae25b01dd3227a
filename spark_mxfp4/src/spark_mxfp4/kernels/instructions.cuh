// Wrappers of PTX instructions that have no C++ equivalent. Source: PTX ISA 9.0. Tests that run the kernels on a CPU
// replace this file.
#pragma once
#include <cooperative_groups.h>

#include <cstdint>

namespace spark {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, int parity) {
  asm volatile(
      "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:}"
      ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_16_if(bool wanted, uint32_t to, const void* from) {
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;}"
               ::"r"(to), "l"(from), "r"(static_cast<int>(wanted)));
}
// Arrives at the barrier for this thread when all its earlier `copy_16_if` copies are complete. Does not block.
__device__ __forceinline__ void arrive_when_copied(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Makes the contents of shared memory that this thread sees visible to wgmma, which reads through the async proxy.
__device__ __forceinline__ void fence_for_matrix_instruction() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at a named barrier without waiting for the other threads.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}
// Stores four 8 x 8 blocks of bf16, transposed. Lanes 8 i to 8 i + 7 give the addresses of the eight rows of block i,
// 16 bytes each.
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&blocks)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(to), "r"(blocks[0]), "r"(blocks[1]), "r"(blocks[2]), "r"(blocks[3]) : "memory");
}
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Unlike fminf and fmaxf, these return NaN if either operand is NaN.
__device__ __forceinline__ float smaller(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Returns two words: the low half of `word` twice, and its high half twice.
__device__ __forceinline__ void halves(uint32_t word, uint32_t (&twice)[2]) {
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\nmov.b32 %0, {l, l};\nmov.b32 %1, {h, h};}"
      : "=r"(twice[0]), "=r"(twice[1]) : "r"(word));
}
// L2 eviction policies for bulk copies: evict the copied data first, or last.
__device__ __forceinline__ uint64_t leave_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t leave_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  return policy;
}

// Tells ptxas that `value` is the same in all lanes of a warp. Otherwise ptxas may serialise the matrix instructions
// after a branch on the value.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Forces the values to be computed here, so that the compiler does not move their computation past the next fence.
template <int COUNT>
__device__ __forceinline__ void pin(uint32_t (&a)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Loads data that other blocks may be storing. Each 32-bit word is either the old or the new value, never a mixture.
__device__ __forceinline__ uint4 load_fresh(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
// A grid barrier like grid_group::sync, but with separate functions to arrive and to wait. One thread of each block of
// a cooperative launch calls them. They use the driver's barrier, because no other memory that all blocks share is
// known to be zero when a kernel starts.
__device__ __forceinline__ unsigned* grid_barrier() { return &cooperative_groups::details::get_grid_workspace()->barrier; }
__device__ __forceinline__ unsigned arrive_at_grid() {
  const unsigned share = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;  // all shares together flip the top bit
  unsigned before;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(grid_barrier()), "r"(share) : "memory");
  return before;
}
__device__ __forceinline__ void wait_for_grid(unsigned before) {
  unsigned now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(grid_barrier()) : "memory");
  } while (((before ^ now) & 0x80000000u) == 0);
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t (&words)[4], uint32_t from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_16(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}

// d += a · b for 16 weight rows, 8 tokens and 16 columns. Source of the fragments A, B and D: PTX ISA 9.0,
// "mma.m16n8k16". For so few tokens it is as fast as wgmma, and it needs only one warp.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace spark
