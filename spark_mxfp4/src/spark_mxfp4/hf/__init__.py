"""gpt-oss in transformers with packed MXFP4 experts.

Importing this package also registers the experts implementation `spark_mxfp4` for `model.set_experts_implementation`.
"""

RELEASE = "5.19"  # of transformers, whose classes we subclass; the extra `hf` in pyproject.toml has the same version

try:
    import transformers

    if not transformers.__version__.startswith(f"{RELEASE}."):
        raise ImportError(  # noqa: TRY301 (the handler below includes this message)
            f"transformers {transformers.__version__} is installed, and it needs {RELEASE}"
        )
    from spark_mxfp4.hf.experts import PackedExperts
    from spark_mxfp4.hf.model import convert_and_replace, load_packed
except ImportError as error:
    raise ImportError(
        f"spark_mxfp4.hf cannot be used · {error} · pip install 'spark-mxfp4[hf]'", name=error.name
    ) from error

__all__ = ["PackedExperts", "convert_and_replace", "load_packed"]
