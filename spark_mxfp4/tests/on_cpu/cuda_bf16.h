// Stands in for CUDA's header where kernels are compiled for a CPU: types, and each thread as a fiber.
//
// A fiber runs until it meets others (barrier, shuffle, matrix instruction, cluster) and goes on when all have come.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { int x = 0, y = 0; };
struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __uint_as_float(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline uint32_t __float_as_uint(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(uint32_t{value.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (std::isnan(value)) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 two) { return {__bfloat162float(two.x), __bfloat162float(two.y)}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float __expf(float value) { return std::exp(value); }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline float __fdividef(float x, float y) { return x / y; }
using std::isinf;
using std::isnan;

namespace cpu {

struct Fiber;
struct Meeting {  // of `expected` fibers; what each brings, `words` at most, is kept for two meetings in turn
  int expected = 0, words = 8, arrived = 0, number = 0;
  std::vector<Fiber*> waiting;
  std::vector<uint32_t> brought[2];
};
struct Block {
  Meeting all;
  std::vector<Meeting> warps, warpgroups;
  std::vector<float> shared;
};
struct Cluster {
  int expected = 0, arrived = 0, number = 0;
  std::vector<Fiber*> waiting;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int thread, block, cluster_waits = 0;
  bool done = false;
  bool copies_fenced = true, registers_fenced = false;  // for the warpgroup's matrix instruction
};
inline std::vector<Block> blocks;
inline Cluster cluster;
inline int cluster_size = 0;  // blocks of the first cluster, which is the only one that meets; 0: all blocks
inline std::deque<Fiber*> runnable, late;  // late: who goes on when nobody else can, one at a time
inline Fiber* current;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline int slow_block = -1, slow_warp = -1;  // whose fibers go on once in 127 turns, while others can

inline void sleep() { swapcontext(&current->context, &scheduler); }
inline void sleep_long() { late.push_back(current), sleep(); }
inline void wake_late() {
  if (late.empty()) return;
  runnable.push_back(late.front());
  late.pop_front();
}
inline void wake(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : waiting) runnable.push_back(fiber);
  waiting.clear();
}
// Brings `size` words; returns what everybody brought.
inline const uint32_t* meet(Meeting& m, int me, const uint32_t* words, int size) {
  std::vector<uint32_t>& brought = m.brought[m.number % 2];
  brought.resize(m.expected * m.words);
  std::memcpy(brought.data() + me * m.words, words, 4 * size);
  const uint32_t* result = brought.data();
  if (++m.arrived == m.expected) {
    m.arrived = 0, ++m.number;
    wake(m.waiting);
  } else {
    m.waiting.push_back(current);
    sleep();
  }
  return result;
}
inline Block& block() { return blocks[current->block]; }
inline Meeting& warp() { return block().warps[current->thread / 32]; }
inline Meeting& warpgroup() { return block().warpgroups[current->thread / 128]; }
inline int lane() { return current->thread % 32; }
inline void enter() { body(), current->done = true, sleep(); }

// Returns how many fibers wait for others that never come.
inline int launch(int number, int threads, int bytes, std::function<void()> kernel) {
  blocks.assign(number, Block{});
  cluster = Cluster{(cluster_size > 0 ? cluster_size : number) * threads};
  body = std::move(kernel);
  late.clear();
  std::vector<Fiber> fibers(static_cast<size_t>(number) * threads);
  for (Block& b : blocks) {
    b.all.expected = threads, b.warps.resize(threads / 32), b.shared.assign(bytes / 4, NAN);
    b.warpgroups.resize(threads / 128);
    for (Meeting& w : b.warps) w.expected = 32;
    for (Meeting& w : b.warpgroups) w.expected = 128, w.words = 16;
  }
  constexpr size_t STACK = 24 << 10;
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& f = fibers[(i * 7919 + 13) % fibers.size()];  // not in the order of their numbers
    f.thread = static_cast<int>(&f - fibers.data()) % threads, f.block = static_cast<int>(&f - fibers.data()) / threads;
    f.stack.reset(new char[STACK]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
    runnable.push_back(&f);
  }
  for (unsigned turn = 0; !runnable.empty() || !late.empty();) {
    if (runnable.empty()) wake_late();
    current = runnable.front();
    runnable.pop_front();
    const bool slow = current->block == slow_block && current->thread / 32 == slow_warp;
    if (slow && !(runnable.empty() && late.empty()) && ++turn % 127 != 0) {
      runnable.push_back(current);
      wake_late();
      continue;
    }
    swapcontext(&scheduler, &current->context);
  }
  return static_cast<int>(std::count_if(fibers.begin(), fibers.end(), [](const Fiber& f) { return !f.done; }));
}

}  // namespace cpu

extern "C" inline __attribute__((used)) void make_slow(int block, int warp) {
  cpu::slow_block = block, cpu::slow_warp = warp;
}

#define threadIdx (Index{cpu::current->thread})
#define blockIdx (Index{cpu::current->block})
#define gridDim (Index{static_cast<int>(cpu::blocks.size())})
#define blockDim (Index{static_cast<int>(cpu::block().warps.size()) * 32})

inline void __syncthreads() { uint32_t nothing = 0; cpu::meet(cpu::block().all, cpu::current->thread, &nothing, 1); }
inline void __syncwarp() { uint32_t nothing = 0; cpu::meet(cpu::warp(), cpu::lane(), &nothing, 1); }
inline void __threadfence() {}
inline uint32_t shuffled(uint32_t word, int from) { return cpu::meet(cpu::warp(), cpu::lane(), &word, 1)[from * 8]; }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  return __uint_as_float(shuffled(__float_as_uint(value), cpu::lane() ^ mask));
}
inline int __shfl_sync(unsigned, int value, int from) { return static_cast<int>(shuffled(value, from)); }
inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint32_t word = vote, *all = cpu::meet(cpu::warp(), cpu::lane(), &word, 1);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= all[i * 8] << i;
  return result;
}
inline int __ffs(unsigned word) { return __builtin_ffs(static_cast<int>(word)); }
inline unsigned atomicInc(unsigned* at, unsigned last) {
  const unsigned old = *at;
  *at = old >= last ? 0 : old + 1;
  return old;
}
template <class T>
T __ldcg(const T* at) { return *at; }
inline int atomicAdd(int* at, int more) {
  const int old = *at;
  *at += more;
  return old;
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline unsigned __match_any_sync(unsigned, int value) {
  const uint32_t word = static_cast<uint32_t>(value), *all = cpu::meet(cpu::warp(), cpu::lane(), &word, 1);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(all[i * 8] == word) << i;
  return result;
}
inline int __shfl_up_sync(unsigned, int value, int by) {
  return static_cast<int>(shuffled(value, std::max(cpu::lane() - by, 0)));
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
  return result;
}
inline void __nanosleep(unsigned) {}
using std::max;
using std::min;
