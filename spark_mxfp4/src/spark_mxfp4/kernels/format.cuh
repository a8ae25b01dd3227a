// MXFP4 weights in chunks of 64 rows by 64 columns, as layout.py stores them, and their expansion to bf16.
#pragma once
#include <cuda_bf16.h>

#include "instructions.cuh"

namespace spark {

constexpr int CHUNK = 64;                           // columns of a chunk
constexpr int VALUE_BYTES = 64 * CHUNK / 2;         // 4 bits for each of 64 x 64 weights
constexpr int CHUNK_BYTES = VALUE_BYTES + 64 * 2;   // the values, then a scale byte per row and 32 columns
constexpr int PLANE_BYTES = CHUNK * 2;              // one row of a plane of activations

// In activations the 64 columns of a chunk are permuted to the order in which the matrix instruction reads the weights
// (layout.py). From the slowest to the fastest index, their order is: step of the instruction (bits 4 and 3 of the
// column), bit 1, block of 32 columns (bit 5), bit 2, bit 0. A row of a chunk has eight vectors of 16 bytes; a vector
// has four words of two columns each. Returns the number (0 to 31) of the pair of columns in `word` of `vector`.
__device__ __forceinline__ int pair_at(int vector, int word) {
  return vector / 2 * 4 + (vector & 1) + (word & 1) * 2 + (word >> 1) * 16;
}

// Converts two scale bytes to two words, each with the same bf16 factor twice. The checkpoint's E8M0 byte s means
// 2^(s - 127); layout.py stores the exponent bits of 2^(s - 1) instead, to cancel the 2^-126 of expand_word.
__device__ __forceinline__ void scale_pairs(uint32_t scales, uint32_t (&factor)[2]) {
  halves(__byte_perm(scales, 0, 0x4140) << 7, factor);
}

// Expands the eight E2M1 values of a word to four pairs of bf16, times 2^-126, by moving the sign, exponent and
// mantissa bits to their places in bf16. layout.py orders the bits so that few shifts and masks are needed and most
// shifts are left shifts. A left shift runs as a multiplication, on a unit that is otherwise idle. Masks and right
// shifts run on the unit that limits the expansion.
__device__ __forceinline__ void expand_word(uint32_t q, uint32_t (&pairs)[4]) {
  constexpr uint32_t ALL = 0x81C081C0, SIGN = 0x80008000, REST = 0x01C001C0;
  pairs[0] = q & ALL;
  pairs[1] = (q << 3) & ALL;
  pairs[2] = ((q & 0x40074007) * 66) & ALL;  // << 6 and << 1 in one: the results do not overlap
  pairs[3] = ((q >> 3) & REST) | ((q << 2) & SIGN);
}

// Expands this thread's 16 bytes of a chunk to four A fragments of the matrix instruction, one per step.
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
