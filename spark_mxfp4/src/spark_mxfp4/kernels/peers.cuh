// Messages between GPUs of one host, stored in the receiver's memory (PTX ISA: st and ld, .relaxed.sys). A message is
// four words. No word is zero, because zero means that it has not arrived.
#pragma once
#include <cstdint>

namespace spark {

__device__ __forceinline__ void send(uint4* to, uint4 message) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(message.x), "r"(message.y),
               "r"(message.z), "r"(message.w) : "memory");
}
// Polls until all four words have arrived.
__device__ __forceinline__ uint4 receive(const uint4* from) {
  uint4 message;
  do {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(message.x), "=r"(message.y), "=r"(message.z), "=r"(message.w) : "l"(from) : "memory");
  } while (!message.x || !message.y || !message.z || !message.w);
  return message;
}

}  // namespace spark
