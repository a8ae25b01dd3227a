"""MXFP4 mixture-of-experts kernels for GPUs: `hopper` (CUDA C++ for compute capability 9.0), `fused` (Triton)."""
