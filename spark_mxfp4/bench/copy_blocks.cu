// Measures the bandwidth of bulk copies alone, a bound for kernels that read in the same way. One block runs on each
// multiprocessor, with `stages` times `bytes` in flight. A read ends in shared memory; a copy also writes to `to`.
#include <cuda_runtime.h>

#include <cstdint>

#include "pace.cuh"  // of src/spark_mxfp4/kernels

namespace {

constexpr int MOST_STAGES = 16, SHARED = 96 << 10;

__device__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void wait(uint32_t bar, int parity) {
  asm volatile(
      "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:}"
      ::"r"(bar), "r"(parity) : "memory");
}

template <bool COPY>
__global__ void move(const uint8_t* from, uint8_t* to, int64_t pieces, int bytes, int stages) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t full[MOST_STAGES];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < stages; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(full + i)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const auto bring = [&](int64_t piece, int stage) {
    wait_for_memory(bytes);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(address(full + stage)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(address(memory + stage * bytes)), "l"(from + piece * bytes), "r"(bytes),
                 "r"(address(full + stage)) : "memory");
  };
  const int64_t share = (pieces + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  const int64_t end = first + share < pieces ? first + share : pieces;
  for (int64_t i = 0; i < stages && first + i < end; ++i) bring(first + i, static_cast<int>(i));
  int stage = 0, parity = 0;
  for (int64_t piece = first; piece < end; ++piece) {
    wait(address(full + stage), parity);
    if (COPY) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                   ::"l"(to + piece * bytes), "r"(address(memory + stage * bytes)), "r"(bytes) : "memory");
      asm volatile("cp.async.bulk.commit_group;");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    if (piece + stages < end) bring(piece + stages, stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  if (COPY) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace

// If `to` is null, only reads.
extern "C" int move_blocks(const void* from, void* to, int64_t total, int bytes, int stages, int blocks, void* stream) {
  if (stages > MOST_STAGES || stages * bytes > SHARED) return cudaErrorInvalidValue;
  const auto kernel = to == nullptr ? move<false> : move<true>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED)) return error;
  kernel<<<blocks, 32, SHARED, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to), total / bytes, bytes, stages);
  return cudaGetLastError();
}
