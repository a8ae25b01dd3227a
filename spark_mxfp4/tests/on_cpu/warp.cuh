// What warp.cuh asks of the hardware, for fibers.
#pragma once
#include "cuda_bf16.h"

namespace spark {

// PTX ISA, mma.m16n8k16: lane 4 g + t holds rows g and g + 8 of A, column g of B, and columns 2 t and 2 t + 1 of C.
inline void multiply_add_8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1}, *all = cpu::meet(cpu::warp(), cpu::lane(), mine, 6);
  const auto part = [](uint32_t word, int high) { return __uint_as_float(high ? word & 0xFFFF0000u : word << 16); };
  const int g = cpu::lane() / 4, t = cpu::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    double sum = c[i];
    const int row_half = i / 2, column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int owner = k % 8 / 2, high = k % 2, upper = k / 8;
      sum += double(part(all[(g * 4 + owner) * 8 + row_half + 2 * upper], high)) *
             part(all[(column * 4 + owner) * 8 + 4 + upper], high);
    }
    c[i] = static_cast<float>(sum);
  }
}
inline unsigned largest_of_warp(unsigned value) {
  const uint32_t* all = cpu::meet(cpu::warp(), cpu::lane(), &value, 1);
  unsigned largest = 0;
  for (int i = 0; i < 32; ++i) largest = all[i * 8] > largest ? all[i * 8] : largest;
  return largest;
}
inline int blocks_of_cluster() {
  return cpu::cluster_size > 0 ? cpu::cluster_size : static_cast<int>(cpu::blocks.size());
}
inline void arrive_at_cluster() {
  cpu::Cluster& c = cpu::cluster;
  if (++c.arrived == c.expected) c.arrived = 0, ++c.number, cpu::wake(c.waiting);
}
inline void wait_for_cluster() {
  const int waits = cpu::current->cluster_waits++;
  while (cpu::cluster.number <= waits) cpu::cluster.waiting.push_back(cpu::current), cpu::sleep();
}
inline float* shared_floats() { return cpu::block().shared.data(); }
inline void store_in_block(float* to, int rank, float value) {
  cpu::blocks[rank].shared[to - shared_floats()] = value;
}
inline void store_in_block(int* to, int rank, int value) {
  std::memcpy(&cpu::blocks[rank].shared[reinterpret_cast<float*>(to) - shared_floats()], &value, 4);
}

}  // namespace spark
