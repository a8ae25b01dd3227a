"""MXFP4 experts for GPUs: `hopper` (CUDA C++ for compute capability 9.0 and 12.1), `fused` (Triton)."""
