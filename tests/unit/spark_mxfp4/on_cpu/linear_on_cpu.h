// Stands in for CUDA where linear.cu is compiled for a CPU: its launches run here, cluster after cluster.
//
// Copies that a GPU makes in the background are made as late as they may be: when somebody waits for them. Until then
// their target holds NaN, so that a kernel that reads too early, or asks for a copy too early, gives wrong sums.
#pragma once
#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include "overlap.cuh"
#include "warp.cuh"

using std::max;
using std::min;

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {__bfloat162float(pair.x), __bfloat162float(pair.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
inline int atomicAdd(int* at, int more) { return std::exchange(*at, *at + more); }
inline void __threadfence_block() {}

namespace cpu {

struct Copy {
  char* to;
  const char* from;  // null: zeros
  int bytes;
};
inline void make(const Copy& c) {
  if (c.from) std::memcpy(c.to, c.from, c.bytes);
  else std::memset(c.to, 0, c.bytes);
}
inline void ask(std::vector<Copy>& copies, void* to, const void* from, int bytes) {
  std::memset(to, 0xFF, bytes);
  copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes});
}
struct Barrier {
  int threads = 0, arrived = 0, arriving = 0, phase = 0;
  long bytes = 0;
  std::vector<Copy> bulk, small;
  void turn() {
    if (arrived == threads && bytes == 0) arrived = 0, phase ^= 1;
  }
};
inline std::unordered_map<const void*, Barrier> barriers;
inline std::unordered_map<const Fiber*, std::vector<std::vector<Copy>>> groups;  // cp.async, the last one is open
inline int first_block;

inline std::vector<std::vector<Copy>>& mine() {
  auto& of_fiber = groups[current];
  if (of_fiber.empty()) of_fiber.emplace_back();
  return of_fiber;
}

// What the tests choose.
inline int bytes_of_block = 232448, bytes_of_processor = 233472, clusters = 2;

}  // namespace cpu

#undef blockIdx
#undef gridDim
#define blockIdx (Index{cpu::first_block + cpu::current->block})
inline Index gridDim, blockDim;

namespace spark {

inline uint8_t* shared_memory() { return reinterpret_cast<uint8_t*>(shared_floats()); }
inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(at) - shared_memory());
}
inline void copy_16(uint32_t to, const uint8_t* from) { cpu::ask(cpu::mine().back(), shared_memory() + to, from, 16); }
inline void close_copies() { cpu::mine().emplace_back(); }
template <int PENDING>
void wait_for_copies() {
  auto& groups = cpu::mine();
  for (int i = 0; i + PENDING + 1 < static_cast<int>(groups.size()); ++i) {
    for (const cpu::Copy& copy : groups[i]) cpu::make(copy);
    groups[i].clear();
  }
}
inline int thread_again() { return threadIdx.x; }
inline uint32_t times(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t x, uint32_t y) {
    return uint32_t{__float2bfloat16(__uint_as_float(x << 16) * __uint_as_float(y << 16)).bits};
  };
  return half(a & 0xFFFF, b & 0xFFFF) | half(a >> 16, b >> 16) << 16;
}
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_add_8(c, a[0], a[1], a[2], a[3], b0, b1);
}

inline void make_barrier(uint64_t* barrier, int threads) { cpu::barriers[barrier] = cpu::Barrier{threads}; }
inline void publish_barriers() {}
inline void expect_bytes(uint64_t* barrier, int bytes) {
  cpu::Barrier& b = cpu::barriers.at(barrier);
  ++b.arrived, b.bytes += bytes;
}
inline void copy_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  cpu::ask(cpu::barriers.at(barrier).bulk, to, from, bytes);
}
inline void copy_16_or_zeros(void* to, const void* from, bool there) {
  cpu::ask(cpu::mine().back(), to, there ? from : nullptr, 16);
}
inline void arrive_with_copies(uint64_t* barrier) {
  cpu::Barrier& b = cpu::barriers.at(barrier);
  auto& open = cpu::mine().back();
  b.small.insert(b.small.end(), open.begin(), open.end()), ++b.arriving;
  open.clear();
}
inline void wait_for_barrier(uint64_t* barrier, int phase) {
  cpu::Barrier& b = cpu::barriers.at(barrier);
  for (int turns = 0; b.phase == phase; ++turns) {
    for (const cpu::Copy& copy : b.bulk) cpu::make(copy), b.bytes -= copy.bytes;
    for (const cpu::Copy& copy : b.small) cpu::make(copy);
    b.bulk.clear(), b.small.clear();
    b.arrived += std::exchange(b.arriving, 0);
    b.turn();
    if (b.phase != phase) return;
    if (turns > 10'000) cpu::block().all.waiting.push_back(cpu::current);  // for ever
    else cpu::runnable.push_back(cpu::current);
    cpu::sleep();
  }
}
inline void store_in_block(float4* to, int rank, float4 value) {
  std::memcpy(reinterpret_cast<uint8_t*>(cpu::blocks[rank].shared.data()) + shared_address(to), &value, 16);
}

}  // namespace spark

// The part of CUDA's runtime that linear.cu calls.
using cudaStream_t = void*;
using cudaError_t = int;
enum { cudaSuccess, cudaErrorInvalidValue };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMaxSharedMemoryPerMultiprocessor };
enum { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct dim3 {
  int x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(int x) : x(x) {}
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  int dynamicSmemBytes = 0, numAttrs = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
};
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  return bytes > cpu::bytes_of_block ? cudaErrorInvalidValue : cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "threads that wait for ever"; }
inline cudaError_t cudaGetDevice(int* number) { return *number = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? cpu::bytes_of_block : cpu::bytes_of_processor;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* number, Kernel, const cudaLaunchConfig_t*) {
  return *number = cpu::clusters, cudaSuccess;
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Arguments&... arguments) {
  const int cluster = config->numAttrs > 1 ? config->attrs[1].val.clusterDim.x : 1;
  gridDim.x = config->gridDim.x, blockDim.x = config->blockDim.x;
  for (cpu::first_block = 0; cpu::first_block < gridDim.x; cpu::first_block += cluster) {
    cpu::barriers.clear(), cpu::groups.clear();
    const int stuck = cpu::launch(cluster, blockDim.x, config->dynamicSmemBytes, [&] { kernel(arguments...); });
    if (stuck) return stuck;
  }
  return cudaSuccess;
}

extern "C" inline __attribute__((used)) void choose_device(int bytes_of_block, int bytes_of_processor, int clusters) {
  cpu::bytes_of_block = bytes_of_block, cpu::bytes_of_processor = bytes_of_processor, cpu::clusters = clusters;
}
