// What instructions.cuh asks of the hardware, for fibers.
//
// Shared memory's addresses are distances from the array `raw`, which has a part for each block that runs. A copy's
// target holds NaN until its barrier's phase ends, so whoever reads too early gets wrong sums.
#pragma once
#include <map>
#include <unordered_map>
#include <utility>

#include "cuda_bf16.h"

namespace spark {

extern uint8_t raw[];

struct Barrier {
  struct Copy {
    void* to;
    const void* from;
    int bytes;
  };
  int count = 0, arrived = 0, phase = 0;
  int64_t bytes = 0;  // expected less copied
  std::vector<Copy> copies;
  bool by_threads = false, last_by_threads = false;  // threads' own copies come in this phase, came in the last one
  std::vector<cpu::Fiber*> waiting;
};
inline std::map<uint32_t, Barrier> barriers;
inline std::map<int, cpu::Meeting> named_barriers;
inline std::unordered_map<const cpu::Fiber*, std::vector<Barrier::Copy>> own_copies;  // that no barrier counts yet
inline std::vector<std::pair<const uint8_t*, const uint8_t*>> tensors;
inline int64_t spins = 0;
inline int named_waits = 0;
inline size_t blocks_arrived = 0;
constexpr int64_t MOST_SPINS = 10'000'000;

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - raw);
}
inline uint8_t* at_address(uint32_t address) { return raw + static_cast<int32_t>(address); }

// Before blocks run, which have so many bytes of `raw`.
inline void forget_blocks(size_t bytes) {
  std::memset(raw, 0xFF, bytes);
  barriers.clear(), named_barriers.clear(), own_copies.clear(), spins = 0, blocks_arrived = 0;
}
inline void end_phase(Barrier& b) {
  if (b.arrived < b.count || b.bytes != 0) return;
  for (const Barrier::Copy& c : b.copies) std::memcpy(c.to, c.from, c.bytes);
  b.copies.clear();
  b.last_by_threads = std::exchange(b.by_threads, false);
  b.arrived = 0, b.phase ^= 1, spins = 0;
  cpu::wake(b.waiting);
}
inline void barrier_init(uint32_t bar, int count) { barriers[bar] = Barrier{count}; }
inline void fence_barriers() {}
inline void barrier_arrive(uint32_t bar) { ++barriers[bar].arrived, end_phase(barriers[bar]); }
inline void barrier_expect(uint32_t bar, int bytes) {
  barriers[bar].bytes += bytes;
  barrier_arrive(bar);
}
inline void barrier_wait(uint32_t bar, int parity) {
  while (barriers[bar].phase == parity) barriers[bar].waiting.push_back(cpu::current), cpu::sleep();
  if (barriers[bar].last_by_threads) cpu::current->copies_fenced = false;
}
// A thread that copies what is in no tensor, which a GPU may refuse, never goes on.
inline void stop_outside_tensors(const void* from, int bytes) {
  const auto* first = static_cast<const uint8_t*>(from);
  const auto has = [&](const auto& tensor) { return first >= tensor.first && first + bytes <= tensor.second; };
  if (bytes <= 0 || std::none_of(tensors.rbegin(), tensors.rend(), has)) cpu::sleep();
}
inline void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t bar, uint64_t) {
  stop_outside_tensors(from, bytes);
  std::memset(at_address(to), 0xFF, bytes);
  barriers[bar].copies.push_back({at_address(to), from, bytes});
  barriers[bar].bytes -= bytes;
  end_phase(barriers[bar]);
}
inline void copy_16_if(bool wanted, uint32_t to, const void* from) {
  if (!wanted) return;
  stop_outside_tensors(from, 16);
  std::memset(at_address(to), 0xFF, 16);
  own_copies[cpu::current].push_back({at_address(to), from, 16});
}
inline void arrive_when_copied(uint32_t bar) {
  std::vector<Barrier::Copy>& mine = own_copies[cpu::current];
  barriers[bar].copies.insert(barriers[bar].copies.end(), mine.begin(), mine.end());
  mine.clear();
  barriers[bar].by_threads = true;
  barrier_arrive(bar);
}
inline void fence_for_matrix_instruction() { cpu::current->copies_fenced = true; }
// PTX ISA, stmatrix .x4.trans: lane 8 g + i names the place of block g's column i; lane 4 r + c has row r, columns 2 c
// and 2 c + 1. Who names a place is not who stores there: lanes wait for each other before they read.
inline void store_transposed(uint32_t to, const uint32_t (&blocks)[4]) {
  const uint32_t mine[5] = {blocks[0], blocks[1], blocks[2], blocks[3], to};
  const uint32_t* all = cpu::meet(cpu::warp(), cpu::lane(), mine, 5);
  const int named_by = (cpu::lane() + 1) % 32, block = named_by / 8, column = named_by % 8;
  for (int row = 0; row < 8; ++row) {
    const uint16_t value = all[(row * 4 + column / 2) * 8 + block] >> (column % 2 * 16) & 0xFFFF;
    std::memcpy(at_address(all[named_by * 8 + 4]) + 2 * row, &value, 2);
  }
}

inline float smaller(float a, float b) { return std::isnan(a) || a < b ? a : b; }
inline float larger(float a, float b) { return std::isnan(a) || a > b ? a : b; }
// Tells whether this thread was the last.
inline bool named_barrier_arrive(int id, int threads) {
  cpu::Meeting& m = named_barriers[id + 16 * cpu::current->block];
  m.expected = threads;
  if (++m.arrived < threads) return false;
  m.arrived = 0;
  cpu::wake(m.waiting);
  return true;
}
inline void named_barrier(int id, int threads) {
  ++named_waits;
  if (named_barrier_arrive(id, threads)) return;
  named_barriers[id + 16 * cpu::current->block].waiting.push_back(cpu::current);
  cpu::sleep();
}
// Each lane has two values of one row, two columns from 2 (l%4) on; afterwards of one column as a row.
inline uint32_t transpose_8x8(uint32_t pair) {
  const uint32_t* all = cpu::meet(cpu::warp(), cpu::lane(), &pair, 1);
  const int row = cpu::lane() / 4, column = cpu::lane() % 4 * 2;
  const auto value = [&](int r, int c) { return all[(r * 4 + c / 2) * 8] >> (c % 2 * 16) & 0xFFFF; };
  return value(column, row) | value(column + 1, row) << 16;
}
inline uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    const float left = __uint_as_float(a >> (16 * half) << 16), right = __uint_as_float(b >> (16 * half) << 16);
    result |= uint32_t{__float2bfloat16(left * right).bits} << (16 * half);
  }
  return result;
}
inline void halves(uint32_t word, uint32_t (&twice)[2]) {
  twice[0] = (word & 0xFFFF) * 0x10001, twice[1] = (word >> 16) * 0x10001;
}
inline uint64_t leave_first() { return 0; }
inline uint64_t leave_last() { return 0; }
inline int uniform(int value) { return value; }
template <int COUNT>
void pin(uint32_t (&)[COUNT]) {}

// Others go on meanwhile. Who asks too often in vain is told zeros, so that a test ends.
inline bool let_others_go_on() {
  cpu::runnable.push_back(cpu::current);
  cpu::sleep();
  return ++spins <= MOST_SPINS;
}
inline uint4 load_fresh(const void* from) { return let_others_go_on() ? *static_cast<const uint4*>(from) : uint4{}; }
inline unsigned arrive_at_grid() { return ++blocks_arrived, 0; }
inline void wait_for_grid(unsigned) {
  while (blocks_arrived < cpu::blocks.size() && let_others_go_on()) {}
}
inline void store_shared(uint32_t to, uint32_t a, uint32_t b) {
  const uint32_t words[2] = {a, b};
  std::memcpy(at_address(to), words, 8);
}
inline void load_shared(uint32_t (&words)[4], uint32_t from) { std::memcpy(words, at_address(from), 16); }
inline uint32_t load_shared_16(uint32_t from) {
  uint16_t value;
  std::memcpy(&value, at_address(from), 2);
  return value;
}
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_add_8(d, a[0], a[1], a[2], a[3], b0, b1);
}

}  // namespace spark

// Says that there is a tensor of so many bytes; with none, that those before are no more.
extern "C" inline __attribute__((used)) void add_tensor(const uint8_t* at, int64_t bytes) {
  if (bytes == 0) spark::tensors.clear();
  spark::tensors.emplace_back(at, at + bytes);
}
