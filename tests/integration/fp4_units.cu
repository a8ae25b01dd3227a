// Small kernels like those that the audit has to judge. Their names contain the words of CUTLASS's and vLLM's names.
#include <cstdio>
#include <cuda_fp4.h>

struct GroupProblemShape {};
struct CollectiveMma {};
struct float_e2m1_t {};

#if __CUDA_ARCH__ >= 1200 && defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#define HAS_BLOCK_SCALED_MMA 1
#endif

// 16 block-scaled MMAs of E4M3 with E2M1 (m16n8k32); without them the stub that CUTLASS puts in their place.
template <class Shape, class Mainloop, class Element>
__global__ void grouped(float* d, const unsigned* a, const unsigned* b, unsigned scale) {
#ifdef HAS_BLOCK_SCALED_MMA
  float c[4] = {0, 0, 0, 0};
#pragma unroll
  for (int step = 0; step < 16; ++step) {
    const unsigned *x = a + step * 128 + threadIdx.x * 4, *y = b + step * 64 + threadIdx.x * 2;
    asm volatile(
        "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e2m1.f32.ue8m0 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {0,0}, %10, {0,0};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]), "r"(scale));
  }
  for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = c[i];
#else
  printf("ERROR : Arch conditional MMA instruction used without targeting appropriate compute capability. Aborting.\n");
  __trap();
#endif
}

#ifdef WITH_GEMM
template __global__ void grouped<GroupProblemShape, CollectiveMma, float_e2m1_t>(
    float*, const unsigned*, const unsigned*, unsigned);
#endif

#ifdef WITH_CONVERSION
__global__ void cvt_fp32_to_fp4(const float2* in, unsigned char* out) {
  out[threadIdx.x] = __nv_cvt_float2_to_fp4x2(in[threadIdx.x], __NV_E2M1, cudaRoundNearest);
}
#endif

#ifdef WITH_INLINE_PTX
__global__ void inline_cvt_e2m1x2(const float2* in, unsigned char* out) {
  unsigned short packed;
  float2 x = in[threadIdx.x];
  asm("{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %1, %2; cvt.u16.u8 %0, b; }" : "=h"(packed) : "f"(x.y), "f"(x.x));
  out[threadIdx.x] = packed;
}
#endif

#ifdef WITH_MIX
// The same opcodes with different modifiers, which the audit must count apart.
#define MMA(A, B)                                                                                                     \
  asm volatile("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32." A "." B ".f32.ue8m0 " \
               "{%0,%1,%2,%3}, {%4,%4,%5,%5}, {%4,%5}, {%0,%1,%2,%3}, %4, {0,0}, %5, {0,0};"                         \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(x), "r"(y))
#define CVT(TO) asm volatile("{ .reg .b16 h; cvt.rn.satfinite." TO "x2.f32 h, %1, %2; cvt.u32.u16 %0, h; }" : "=r"(x) : "f"(c[0]), "f"(c[1]))
__global__ void mixed_e2m1(float* d, unsigned x, unsigned y) {
  float c[4] = {0, 0, 0, 0};
  MMA("e4m3", "e2m1");
  MMA("e2m1", "e4m3");
  MMA("e5m2", "e2m1");
  MMA("e2m1", "e2m1");
  MMA("e4m3", "e4m3");
  CVT("e4m3");
  MMA("e3m2", "e2m1");
  CVT("e5m2");
  MMA("e2m3", "e2m1");
  for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = c[i];
}
#endif

// Nothing of FP4 in it: runs on any device.
__global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }
