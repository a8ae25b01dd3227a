// Block-scaled products of MXFP4 weights and MXFP8 activations, for 16 of 64 x 64 weights' rows by 8 to 64 tokens, as they
// would replace layer.cuh's expansion to bf16. Only their instructions are counted: nothing runs this.
#include <cstdint>

__device__ void load(uint32_t (&words)[4], uint32_t from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
}
__device__ uint32_t load_16(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}
template <int SCALE>
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t of_a, uint32_t of_b) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e4m3.f32.ue8m0 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,0}, {%11}, {%12,0};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(of_a), "r"(of_b), "n"(SCALE));
}

template <int TOKENS>
__global__ void chunks(float* out, int number, uint32_t w, uint32_t scales, uint32_t x, uint32_t x_scales) {
  constexpr int STEP = 3, EIGHTS = TOKENS / 8;
  float sum[EIGHTS][4] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < number; chunk += STEP) {
#pragma unroll
    for (int u = 0; u < STEP; ++u) {
      uint32_t words[4], a[2][4], b[4];
      load(words, w + u * 2176);
      const uint32_t scale = load_16(scales + u * 2176);
      for (int i = 0; i < 4; ++i) {  // four bits in the middle of each byte
        a[i / 2][i % 2 * 2] = words[i] & 0x3C3C3C3C;
        a[i / 2][i % 2 * 2 + 1] = __funnelshift_l(words[i], words[i], 4) & 0x3C3C3C3C;
      }
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) {
        load(b, x + (u * EIGHTS + n) * 512);
        const uint32_t x_scale = load_16(x_scales + (u * EIGHTS + n) * 16);
        multiply<0>(sum[n], a[0], b[0], b[1], scale, x_scale);
        multiply<1>(sum[n], a[1], b[2], b[3], scale, x_scale);
      }
    }
    w += STEP * 2176, scales += STEP * 2176, x += STEP * TOKENS * 64, x_scales += STEP * TOKENS * 2;
  }
  for (int i = 0; i < EIGHTS * 4; ++i) out[i * blockDim.x + threadIdx.x] = sum[i / 4][i % 4];
}
template __global__ void chunks<8>(float*, int, uint32_t, uint32_t, uint32_t, uint32_t);
template __global__ void chunks<16>(float*, int, uint32_t, uint32_t, uint32_t, uint32_t);
template __global__ void chunks<32>(float*, int, uint32_t, uint32_t, uint32_t, uint32_t);
template __global__ void chunks<64>(float*, int, uint32_t, uint32_t, uint32_t, uint32_t);
