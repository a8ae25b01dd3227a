// Wrappers of instructions for the router, sorting, attention and norm kernels: a matrix instruction, a maximum over a
// warp, and clusters of thread blocks (PTX ISA: mma, redux.sync, barrier.cluster, mapa). Compute capability 9.0 and
// 12.x have all of them. Tests that run the kernels on a CPU replace this file.
#pragma once
#include <cstdint>

namespace spark {

// c += a · b: a is 16 x 16 and b is 16 x 8, both as pairs of bf16; c is 16 x 8 in float32.
__device__ __forceinline__ void multiply_add_8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned largest_of_warp(unsigned value) { return __reduce_max_sync(~0u, value); }

__device__ __forceinline__ int blocks_of_cluster() {
  int number;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(number));
  return number;
}
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Stores to the shared memory of block `rank` of this cluster, at the address that `to` has in this block.
__device__ __forceinline__ void store_in_block(int* to, int rank, int value) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "r"(rank));
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_in_block(float* to, int rank, float value) {
  store_in_block(reinterpret_cast<int*>(to), rank, __float_as_int(value));
}
__device__ __forceinline__ float* shared_floats() {
  extern __shared__ __align__(16) float memory[];
  return memory;
}

}  // namespace spark
