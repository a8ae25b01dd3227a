"""gpt-oss in transformers with packed MXFP4 experts.

Importing it also registers the experts implementation `spark_mxfp4` for `model.set_experts_implementation`.
"""

try:
    from spark_mxfp4.hf.experts import PackedExperts
    from spark_mxfp4.hf.model import convert_and_replace, load_packed
except ImportError as error:
    raise ImportError(
        f"spark_mxfp4.hf cannot be used · {error} · pip install 'spark-mxfp4[hf]'", name=error.name
    ) from error

__all__ = ["PackedExperts", "convert_and_replace", "load_packed"]
