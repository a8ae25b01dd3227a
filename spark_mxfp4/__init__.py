"""MXFP4 numbers and mixture-of-experts kernels, usable from vLLM, transformers or alone."""
