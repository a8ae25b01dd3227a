// Stands in for CUDA where linear.cu is compiled for a CPU.
//
// Copies that a GPU makes in the background are made as late as they may be: when somebody waits for them. Until then
// their target holds NaN, so that a kernel that reads too early, or asks for a copy too early, gives wrong sums.
#pragma once
#include <algorithm>
#include <unordered_map>

#include "overlap.cuh"
#include "runtime.h"
#include "warp.cuh"

#define __align__(bytes)

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace spark {

alignas(16) uint8_t shared[cpu::MOST_BYTES];  // of the block that runs

}  // namespace spark

namespace cpu {

struct Copy {
  uint8_t* to;
  const uint8_t* from;
};
using Group = std::vector<Copy>;
inline std::unordered_map<const Fiber*, std::vector<Group>> groups;  // cp.async's of each thread, the last one is open

inline std::vector<Group>& my_groups() {
  std::vector<Group>& mine = groups[current];
  if (mine.empty()) mine.emplace_back();
  return mine;
}

void begin_block(int bytes) {
  groups.clear();
  std::memset(spark::shared, 0xFF, bytes);
}

}  // namespace cpu

inline size_t __cvta_generic_to_shared(const void* at) { return static_cast<const uint8_t*>(at) - spark::shared; }

namespace spark {

inline void copy_16(uint32_t to, const uint8_t* from) {
  std::memset(shared + to, 0xFF, 16);
  cpu::my_groups().back().push_back({shared + to, from});
}
inline void close_copies() { cpu::my_groups().emplace_back(); }
template <int PENDING>
void wait_for_copies() {
  std::vector<cpu::Group>& groups = cpu::my_groups();
  for (int i = 0; i + PENDING + 1 < static_cast<int>(groups.size()); ++i) {
    for (const cpu::Copy& copy : groups[i]) std::memcpy(copy.to, copy.from, 16);
    groups[i].clear();
  }
}
inline uint32_t times(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t x, uint32_t y) {
    return uint32_t{__float2bfloat16(__uint_as_float(x << 16) * __uint_as_float(y << 16)).bits};
  };
  return half(a & 0xFFFF, b & 0xFFFF) | half(a >> 16, b >> 16) << 16;
}
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_add_8(c, a[0], a[1], a[2], a[3], b0, b1);
}

}  // namespace spark
