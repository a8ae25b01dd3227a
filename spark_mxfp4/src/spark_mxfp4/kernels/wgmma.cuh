// Hopper's warpgroup matrix instruction, 64 x N x 16, with A in registers and B in shared memory. Source: PTX ISA 9.0,
// "wgmma.mma_async". A thread holds N/2 floats of D and four pairs of bf16 of A.
#pragma once
#include <cstdint>

namespace spark {

template <int N>
struct Wgmma;

// The operands of the assembly text: N/2 accumulators, four for every eight columns, have the first numbers; the five
// inputs (A0 to A3 and B) have the next.
#define SPARK_S0 "%0,%1,%2,%3"
#define SPARK_S1 SPARK_S0 ",%4,%5,%6,%7"
#define SPARK_S2 SPARK_S1 ",%8,%9,%10,%11"
#define SPARK_S3 SPARK_S2 ",%12,%13,%14,%15"
#define SPARK_S4 SPARK_S3 ",%16,%17,%18,%19"
#define SPARK_S5 SPARK_S4 ",%20,%21,%22,%23"
#define SPARK_S6 SPARK_S5 ",%24,%25,%26,%27"
#define SPARK_S7 SPARK_S6 ",%28,%29,%30,%31"
#define SPARK_S8 SPARK_S7 ",%32,%33,%34,%35"
#define SPARK_S9 SPARK_S8 ",%36,%37,%38,%39"
#define SPARK_S10 SPARK_S9 ",%40,%41,%42,%43"
#define SPARK_S11 SPARK_S10 ",%44,%45,%46,%47"
#define SPARK_S12 SPARK_S11 ",%48,%49,%50,%51"
#define SPARK_S13 SPARK_S12 ",%52,%53,%54,%55"
#define SPARK_S14 SPARK_S13 ",%56,%57,%58,%59"
#define SPARK_S15 SPARK_S14 ",%60,%61,%62,%63"
#define SPARK_S16 SPARK_S15 ",%64,%65,%66,%67"
#define SPARK_S17 SPARK_S16 ",%68,%69,%70,%71"
#define SPARK_S18 SPARK_S17 ",%72,%73,%74,%75"
#define SPARK_S19 SPARK_S18 ",%76,%77,%78,%79"
#define SPARK_S20 SPARK_S19 ",%80,%81,%82,%83"
#define SPARK_S21 SPARK_S20 ",%84,%85,%86,%87"
#define SPARK_S22 SPARK_S21 ",%88,%89,%90,%91"
#define SPARK_S23 SPARK_S22 ",%92,%93,%94,%95"
#define SPARK_S24 SPARK_S23 ",%96,%97,%98,%99"
#define SPARK_S25 SPARK_S24 ",%100,%101,%102,%103"
#define SPARK_S26 SPARK_S25 ",%104,%105,%106,%107"
#define SPARK_S27 SPARK_S26 ",%108,%109,%110,%111"
#define SPARK_S28 SPARK_S27 ",%112,%113,%114,%115"
#define SPARK_S29 SPARK_S28 ",%116,%117,%118,%119"
#define SPARK_S30 SPARK_S29 ",%120,%121,%122,%123"
#define SPARK_S31 SPARK_S30 ",%124,%125,%126,%127"

#define SPARK_E(i) "+f"(d[4 * (i)]), "+f"(d[4 * (i) + 1]), "+f"(d[4 * (i) + 2]), "+f"(d[4 * (i) + 3])
#define SPARK_E0 SPARK_E(0)
#define SPARK_E1 SPARK_E0, SPARK_E(1)
#define SPARK_E2 SPARK_E1, SPARK_E(2)
#define SPARK_E3 SPARK_E2, SPARK_E(3)
#define SPARK_E4 SPARK_E3, SPARK_E(4)
#define SPARK_E5 SPARK_E4, SPARK_E(5)
#define SPARK_E6 SPARK_E5, SPARK_E(6)
#define SPARK_E7 SPARK_E6, SPARK_E(7)
#define SPARK_E8 SPARK_E7, SPARK_E(8)
#define SPARK_E9 SPARK_E8, SPARK_E(9)
#define SPARK_E10 SPARK_E9, SPARK_E(10)
#define SPARK_E11 SPARK_E10, SPARK_E(11)
#define SPARK_E12 SPARK_E11, SPARK_E(12)
#define SPARK_E13 SPARK_E12, SPARK_E(13)
#define SPARK_E14 SPARK_E13, SPARK_E(14)
#define SPARK_E15 SPARK_E14, SPARK_E(15)
#define SPARK_E16 SPARK_E15, SPARK_E(16)
#define SPARK_E17 SPARK_E16, SPARK_E(17)
#define SPARK_E18 SPARK_E17, SPARK_E(18)
#define SPARK_E19 SPARK_E18, SPARK_E(19)
#define SPARK_E20 SPARK_E19, SPARK_E(20)
#define SPARK_E21 SPARK_E20, SPARK_E(21)
#define SPARK_E22 SPARK_E21, SPARK_E(22)
#define SPARK_E23 SPARK_E22, SPARK_E(23)
#define SPARK_E24 SPARK_E23, SPARK_E(24)
#define SPARK_E25 SPARK_E24, SPARK_E(25)
#define SPARK_E26 SPARK_E25, SPARK_E(26)
#define SPARK_E27 SPARK_E26, SPARK_E(27)
#define SPARK_E28 SPARK_E27, SPARK_E(28)
#define SPARK_E29 SPARK_E28, SPARK_E(29)
#define SPARK_E30 SPARK_E29, SPARK_E(30)
#define SPARK_E31 SPARK_E30, SPARK_E(31)

#define SPARK_WGMMA(N, D, A0, A1, A2, A3, B, ...)                                                               \
  template <>                                                                                                   \
  struct Wgmma<N> {                                                                                             \
    static __device__ __forceinline__ void run(float (&d)[N / 2], const uint32_t* a, uint64_t b) {              \
      asm volatile(                                                                                             \
          "{.reg .pred p; setp.eq.b32 p, 0, 0;"                                                                 \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" D "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 \
          "}, %" #B ", p, 1, 1, 0;}"                                                                            \
          : __VA_ARGS__                                                                                         \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                \
    }                                                                                                           \
  };

SPARK_WGMMA(8, SPARK_S0, 4, 5, 6, 7, 8, SPARK_E0)
SPARK_WGMMA(16, SPARK_S1, 8, 9, 10, 11, 12, SPARK_E1)
SPARK_WGMMA(24, SPARK_S2, 12, 13, 14, 15, 16, SPARK_E2)
SPARK_WGMMA(32, SPARK_S3, 16, 17, 18, 19, 20, SPARK_E3)
SPARK_WGMMA(40, SPARK_S4, 20, 21, 22, 23, 24, SPARK_E4)
SPARK_WGMMA(48, SPARK_S5, 24, 25, 26, 27, 28, SPARK_E5)
SPARK_WGMMA(56, SPARK_S6, 28, 29, 30, 31, 32, SPARK_E6)
SPARK_WGMMA(64, SPARK_S7, 32, 33, 34, 35, 36, SPARK_E7)
SPARK_WGMMA(72, SPARK_S8, 36, 37, 38, 39, 40, SPARK_E8)
SPARK_WGMMA(80, SPARK_S9, 40, 41, 42, 43, 44, SPARK_E9)
SPARK_WGMMA(88, SPARK_S10, 44, 45, 46, 47, 48, SPARK_E10)
SPARK_WGMMA(96, SPARK_S11, 48, 49, 50, 51, 52, SPARK_E11)
SPARK_WGMMA(104, SPARK_S12, 52, 53, 54, 55, 56, SPARK_E12)
SPARK_WGMMA(112, SPARK_S13, 56, 57, 58, 59, 60, SPARK_E13)
SPARK_WGMMA(120, SPARK_S14, 60, 61, 62, 63, 64, SPARK_E14)
SPARK_WGMMA(128, SPARK_S15, 64, 65, 66, 67, 68, SPARK_E15)
SPARK_WGMMA(136, SPARK_S16, 68, 69, 70, 71, 72, SPARK_E16)
SPARK_WGMMA(144, SPARK_S17, 72, 73, 74, 75, 76, SPARK_E17)
SPARK_WGMMA(152, SPARK_S18, 76, 77, 78, 79, 80, SPARK_E18)
SPARK_WGMMA(160, SPARK_S19, 80, 81, 82, 83, 84, SPARK_E19)
SPARK_WGMMA(168, SPARK_S20, 84, 85, 86, 87, 88, SPARK_E20)
SPARK_WGMMA(176, SPARK_S21, 88, 89, 90, 91, 92, SPARK_E21)
SPARK_WGMMA(184, SPARK_S22, 92, 93, 94, 95, 96, SPARK_E22)
SPARK_WGMMA(192, SPARK_S23, 96, 97, 98, 99, 100, SPARK_E23)
SPARK_WGMMA(200, SPARK_S24, 100, 101, 102, 103, 104, SPARK_E24)
SPARK_WGMMA(208, SPARK_S25, 104, 105, 106, 107, 108, SPARK_E25)
SPARK_WGMMA(216, SPARK_S26, 108, 109, 110, 111, 112, SPARK_E26)
SPARK_WGMMA(224, SPARK_S27, 112, 113, 114, 115, 116, SPARK_E27)
SPARK_WGMMA(232, SPARK_S28, 116, 117, 118, 119, 120, SPARK_E28)
SPARK_WGMMA(240, SPARK_S29, 120, 121, 122, 123, 124, SPARK_E29)
SPARK_WGMMA(248, SPARK_S30, 124, 125, 126, 127, 128, SPARK_E30)
SPARK_WGMMA(256, SPARK_S31, 128, 129, 130, 131, 132, SPARK_E31)

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The descriptor of B: N rows of 64 bf16 (128 bytes), 128-byte swizzle, groups of eight rows 1024 bytes apart.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared_address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((shared_address & 0x3FFFF) >> 4);
}

}  // namespace spark
