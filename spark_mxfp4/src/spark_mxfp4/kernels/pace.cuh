// For measurements (bench/measure_small.py): where SPARK_PACE is defined, a memory that reads so many GB/s stands before the
// GPU's own. A copy of weights begins when the bytes before it, of all blocks, have had their time.
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
