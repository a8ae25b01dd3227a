"""Checks of the model directory."""

from __future__ import annotations

from validate.checks_hardware import gib
from validate.finding import MODEL_FIX, Check, Judgement, View, failed, judged, passed


def some(names: list[str]) -> str:
    """The first few of many."""
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def model_files(view: View) -> Judgement:
    """Every shard and tokenizer file is there and as long as its header says."""
    for fact, words in (
        ("model.shards_missing", "missing shards"),
        ("model.shards_damaged", "damaged shards"),
        ("model.files_missing", "missing files"),
    ):
        if names := view.names(fact):
            return failed(f"{words}: {some(names)}")
    return passed(f"all shards whole, {gib(view.number('model.weight_bytes'))}")


def model_format(view: View) -> Judgement:
    """It is a gpt-oss checkpoint in MXFP4."""
    kind, method = view.text("model.model_type"), view.text("model.quant_method")
    evidence = f"model_type {kind}, quant_method {method}; wanted gpt_oss, mxfp4"
    return judged((kind, method) == ("gpt_oss", "mxfp4"), evidence)


CHECKS = (
    Check(
        "model-files",
        "Every shard of the index is there and whole, and so are the tokenizer's files.",
        ("model.shards_missing", "model.shards_damaged", "model.files_missing", "model.weight_bytes"),
        model_files,
        MODEL_FIX,
    ),
    Check(
        "model-format",
        "The checkpoint is gpt-oss with MXFP4 weights.",
        ("model.model_type", "model.quant_method"),
        model_format,
        "--model DIR of a gpt-oss checkpoint with native MXFP4 weights",
    ),
)
