// Messages for fibers: one that has not arrived never does, and the launch then reports a thread that waits for ever.
#pragma once
#include <cstdint>

namespace spark {

inline void send(uint4* to, uint4 message) { *to = message; }
inline uint4 receive(const uint4* from) {
  while (!from->x || !from->y || !from->z || !from->w) cpu::sleep();
  return *from;
}

}  // namespace spark
