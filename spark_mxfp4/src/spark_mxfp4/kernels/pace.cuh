// A throttle for benchmarks (bench/measure_small.py). If SPARK_PACE is defined, all blocks together copy weights at
// that many GB/s at most: a copy starts when all copies requested before it would have ended at this rate.
#pragma once

#ifdef SPARK_PACE
__device__ unsigned long long memory_free;  // the time when the memory is free, in units of one byte at SPARK_PACE
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
