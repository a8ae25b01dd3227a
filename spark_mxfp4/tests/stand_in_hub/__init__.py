"""A stand-in for triton_kernels, in torch, for CPUs: the names that transformers 5.19 calls; the layout is its own."""
