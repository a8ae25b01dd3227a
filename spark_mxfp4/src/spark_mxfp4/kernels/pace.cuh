// For measurements (bench/measure_small.py): if SPARK_PACE is defined, copies of weights are slowed to that many GB/s. A
// copy begins when the time of the bytes before it, of all blocks, has passed at this rate.
#pragma once

#ifdef SPARK_PACE
__device__ unsigned long long memory_free;  // in bytes that the memory could have read by then
__device__ __forceinline__ unsigned long long readable_bytes() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return (ns & ((1ull << 50) - 1)) * SPARK_PACE;
}
__device__ __forceinline__ void wait_for_memory(int bytes) {
  atomicMax(&memory_free, readable_bytes());
  const unsigned long long begin = atomicAdd(&memory_free, static_cast<unsigned long long>(bytes));
  while (readable_bytes() < begin) {}
}
#else
__device__ inline void wait_for_memory(int) {}
#endif
