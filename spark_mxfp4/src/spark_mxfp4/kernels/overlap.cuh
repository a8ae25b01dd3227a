// Programmatic dependent launch: a kernel can start before the preceding kernel has ended (PTX ISA, griddepcontrol).
// Every block of every kernel waits for the preceding kernel before it writes. So once that kernel has ended, all
// earlier ones have ended too.
#pragma once

namespace spark {

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

}  // namespace spark
