"""Prints, as JSON, what the architecture says to checkpoints and devices that it refuses; for MAX's own Python."""

import json
from types import SimpleNamespace
from unittest import mock

from spark_mxfp4.max import architecture
from spark_mxfp4.max.architecture import GptOssConfig, PackedGptOssConfig, PackedModel


def finalized(**fields):
    """Return what is said to a checkpoint in which MAX has found `fields`."""
    config = object.__new__(PackedGptOssConfig)
    found = {"quant_config": object(), "attention_bias": True, "devices": [SimpleNamespace(is_cpu=lambda: False)]}
    vars(config).update(found | fields)
    with mock.patch.object(GptOssConfig, "finalize"):
        return message(lambda: config.finalize(None, {}, None))


def initialized(devices):
    """Return what is said to that many devices."""
    found = SimpleNamespace(devices=[object()] * devices)
    with mock.patch.object(GptOssConfig, "initialize", return_value=found):
        return message(lambda: PackedGptOssConfig.initialize(None, max_seq_len=128))


def batched():
    """Return what is said to two sequences at once on a CPU."""
    model = SimpleNamespace(devices=[SimpleNamespace(is_host=True)], max_batch_size=2)
    return message(lambda: PackedModel.graph_specs(model, None))


def of_format(name):
    """Return what is said to a format's name."""
    with mock.patch.dict("os.environ", {architecture.SETTING: name}):
        return message(architecture.quantization_format)


def message(call):
    """Return the text of the ValueError that `call` raises; nothing if it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


print(json.dumps({
    "as gpt-oss has it": finalized(),
    "experts in bfloat16": finalized(quant_config=None),
    "attention without biases": finalized(attention_bias=False),
    "one device": initialized(1),
    "two devices": initialized(2),
    "two sequences": batched(),
    "a known format": of_format("dequant"),
    "another format": of_format("fp8"),
}))  # fmt: skip
