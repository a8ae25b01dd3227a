// The warpgroup's matrix instruction, for fibers, as late as it may be: when somebody waits for it and nobody else can
// go on. Until then it has not read its operands nor changed its sums, so that a kernel that overwrites registers or
// shared memory too early, or uses sums too early, gets wrong ones.
#pragma once
#include "instructions.cuh"

namespace spark {

struct Product {
  float* d;
  const uint32_t* a;
  uint64_t b;
  int columns;
  bool fenced;
};
using ProductGroup = std::vector<Product>;
inline std::unordered_map<const cpu::Fiber*, std::deque<ProductGroup>> products;  // of each thread, the last is open

inline std::deque<ProductGroup>& my_products() {
  std::deque<ProductGroup>& mine = products[cpu::current];
  if (mine.empty()) mine.emplace_back();
  return mine;
}
template <int N>
struct Wgmma {
  static void run(float (&d)[N / 2], const uint32_t* a, uint64_t b) {
    const bool fenced = cpu::current->copies_fenced && cpu::current->registers_fenced;
    my_products().back().push_back({d, a, b, N, fenced});
  }
};
// Each group's registers are new ones here, so each group wants a fence.
inline void wgmma_fence() { cpu::current->registers_fenced = true; }
inline void wgmma_commit() {
  cpu::current->registers_fenced = false;
  my_products().emplace_back();
}
inline uint64_t wgmma_descriptor(uint32_t shared_address) { return (shared_address & 0x3FFFF) >> 4; }

// PTX ISA, wgmma.m64nNk16: lane 4 g + t of a warp holds rows g and g + 8 of the warp's 16 of A, columns 2 t and 2 t + 1
// and then both plus 8. Of D it holds the same rows, columns 2 t and 2 t + 1 of each eight. Each column of B is 128
// bytes of shared memory, of which 16 at a time have changed places as the address says. `a` is what the four lanes
// with these rows of A have.
inline void multiply_late(const Product& p, const uint32_t* const (&a)[4]) {
  const auto value = [](uint32_t pair, int high) { return __uint_as_float(high ? pair & 0xFFFF0000u : pair << 16); };
  float rows[2][16];
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 2; ++i) rows[i][k] = value(a[k % 8 / 2][i + k / 8 * 2], k % 2);
  const uint32_t start = static_cast<uint32_t>(p.b & 0x3FFF) << 4;
  for (int j = 0; j < p.columns / 4; ++j) {
    const int column = j / 2 * 8 + cpu::lane() % 4 * 2 + j % 2;
    float sums[2] = {};
    for (int k = 0; k < 16; k += 8) {
      const uint32_t address = start + column * 128 + k * 2;
      uint32_t words[4];
      std::memcpy(words, at_address(address ^ (address >> 7 & 7) << 4), 16);
      for (int i = 0; i < 8; ++i) {
        const float right = value(words[i / 2], i % 2);
        sums[0] += rows[0][k + i] * right, sums[1] += rows[1][k + i] * right;
      }
    }
    for (int i = 0; i < 2; ++i) p.d[j / 2 * 4 + i * 2 + j % 2] += p.fenced ? sums[i] : NAN;
  }
}
template <int PENDING>
void wgmma_wait() {
  constexpr int AT_ONCE = 4;
  std::deque<ProductGroup>& mine = my_products();
  for (; mine.size() > PENDING + 1; mine.pop_front()) {
    const ProductGroup& group = mine.front();
    for (size_t first = 0; first < group.size(); first += AT_ONCE) {
      const int number = static_cast<int>(std::min<size_t>(AT_ONCE, group.size() - first));
      const int thread = cpu::current->thread % 128;
      uint32_t registers[AT_ONCE * 4];
      for (int i = 0; i < number; ++i) std::memcpy(registers + 4 * i, group[first + i].a, 16);
      const uint32_t* all = cpu::meet(cpu::warpgroup(), thread, registers, 4 * number);
      cpu::sleep_long();
      for (int i = 0; i < number; ++i) {
        const uint32_t* a[4];
        for (int t = 0; t < 4; ++t) a[t] = all + (thread / 4 * 4 + t) * (AT_ONCE * 4) + 4 * i;
        multiply_late(group[first + i], a);
      }
    }
  }
}

}  // namespace spark
