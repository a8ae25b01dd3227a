// Chunks of 64 rows by 64 columns of MXFP4 weights as layout.py lays them out, and their expansion to bf16.
#pragma once
#include <cuda_bf16.h>

#include "instructions.cuh"

namespace spark {

constexpr int CHUNK = 64;                           // columns of a chunk
constexpr int VALUE_BYTES = 64 * CHUNK / 2;         // 64 rows
constexpr int CHUNK_BYTES = VALUE_BYTES + 64 * 2;   // and a scale for each row and 32 columns
constexpr int PLANE_BYTES = CHUNK * 2;              // a row's bytes in one plane of activations

// The columns of a chunk of activations are permuted to match the weights' order in the matrix instruction (layout.py):
// step, bit 1 of the column, its block of 32, bit 2, bit 0. A vector of 16 bytes holds four words of two columns each.
// Returns the index of a word's pair among the chunk's 32 pairs.
__device__ __forceinline__ int pair_at(int vector, int word) {
  return vector / 2 * 4 + (vector & 1) + (word & 1) * 2 + (word >> 1) * 16;
}

// Two E8M0 bytes 2^(s - 127), kept as the exponents of 2^(s - 1) by layout.py, as pairs of equal bf16.
__device__ __forceinline__ void scale_pairs(uint32_t scales, uint32_t (&factor)[2]) {
  halves(__byte_perm(scales, 0, 0x4140) << 7, factor);
}

// Four E2M1 pairs of a word as bf16 pairs times 2^-126: sign, exponent and mantissa bits go where bf16 has them.
// layout.py orders the bits so that few shifts and masks are needed, and most shifts go left: a left shift runs as a
// multiplication, on a unit that is idle here; masks and right shifts share the unit that limits decoding.
__device__ __forceinline__ void expand_word(uint32_t q, uint32_t (&pairs)[4]) {
  constexpr uint32_t ALL = 0x81C081C0, SIGN = 0x80008000, REST = 0x01C001C0;
  pairs[0] = q & ALL;
  pairs[1] = (q << 3) & ALL;
  pairs[2] = ((q & 0x40074007) * 66) & ALL;  // << 6 and << 1 at once: no two of these bits meet
  pairs[3] = ((q >> 3) & REST) | ((q << 2) & SIGN);
}

// This thread's part of 64 x 64 weights: 16 bytes become four A fragments of the matrix instruction.
__device__ __forceinline__ void expand(const uint8_t* chunk, int thread, uint32_t* a) {
  const uint4 q = *reinterpret_cast<const uint4*>(chunk + 16 * thread);
  const uint32_t scales = *reinterpret_cast<const uint16_t*>(chunk + VALUE_BYTES + 2 * (thread >> 1));
  const uint32_t words[4] = {q.x, q.y, q.z, q.w};
  uint32_t factor[2];
  scale_pairs(scales, factor);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t pairs[4];
    expand_word(words[step], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[4 * step + i] = multiply(pairs[i], factor[i & 1]);
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace spark
