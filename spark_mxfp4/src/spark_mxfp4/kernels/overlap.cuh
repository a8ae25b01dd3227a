// Kernels that begin while the one before them still ends (PTX ISA, griddepcontrol). Every block of every kernel waits
// before it writes, so "the one before has ended" holds for all before it too.
#pragma once

namespace spark {

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

}  // namespace spark
