"""The integration with vLLM: the quantization plugin `spark-mxfp4`."""

try:
    import vllm  # noqa: F401 - everything here needs it
except ImportError as error:
    raise type(error)(
        f"spark_mxfp4.vllm cannot be used · {error} · pip install 'spark-mxfp4[vllm]'", name=error.name
    ) from error
