"""vLLM's door: the quantization plugin `spark-mxfp4`."""
