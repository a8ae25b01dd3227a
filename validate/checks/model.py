"""Checks of the model directory."""

from __future__ import annotations

from sparkforge.core.memory import in_gib as gib
from validate.checks.finding import MODEL_FIX, CheckList, CheckResult, View, failed, judged, passed

CHECKS = CheckList[View]()


def some(names: list[str]) -> str:
    """The first few of many."""
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


@CHECKS.add(
    "model-files",
    "Every shard of the index is there and whole, and so are the tokenizer's files.",
    needs=("model",),
    fix=MODEL_FIX,
    about=(
        "Every shard must have the size that its header promises and the tensors that the index places in it. The "
        "bytes of the weights are not hashed, because that takes minutes."
    ),
)
def _model_files(view: View) -> CheckResult:
    for fact, problem in (
        ("model.shards_missing", "missing shards"),
        ("model.shards_damaged", "damaged shards"),
        ("model.files_missing", "missing files"),
    ):
        if names := view.names(fact):
            return failed(f"{problem}: {some(names)}")
    return passed(f"all shards whole, {gib(view.number('model.weight_bytes'))}")


@CHECKS.add(
    "model-format",
    "The checkpoint is gpt-oss with MXFP4 weights.",
    needs=("model",),
    fix="--model DIR of a gpt-oss checkpoint with native MXFP4 weights",
    about=("`config.json` must say `model_type: gpt_oss` and `quantization_config.quant_method: mxfp4`."),
)
def _model_format(view: View) -> CheckResult:
    kind, method = view.text("model.model_type"), view.text("model.quant_method")
    evidence = f"model_type {kind}, quant_method {method}; wanted gpt_oss, mxfp4"
    return judged((kind, method) == ("gpt_oss", "mxfp4"), evidence)
