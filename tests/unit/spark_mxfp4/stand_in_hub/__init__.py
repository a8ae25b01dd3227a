"""A stand-in for triton_kernels, in torch and for CPUs: the names that transformers 5.19 calls, with a layout of its own."""
