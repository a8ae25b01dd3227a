"""Print the architecture's errors for unsupported checkpoints and devices as JSON; runs in MAX's own Python."""

import json
from types import SimpleNamespace
from unittest import mock

from max.pipelines.architectures.gpt_oss import memory_planner

from spark_mxfp4.max import architecture
from spark_mxfp4.max.architecture import GptOssConfig, PackedGptOssConfig, PackedModel

GPU, CPU = SimpleNamespace(is_cpu=lambda: False), SimpleNamespace(is_cpu=lambda: True)


def finalized(**fields):
    config = object.__new__(PackedGptOssConfig)
    found = {"quant_config": object(), "attention_bias": True, "devices": [GPU]}
    vars(config).update(found | fields)
    with mock.patch.object(GptOssConfig, "finalize"):
        return message(lambda: config.finalize(None, {}, None))


def initialized(*devices, **fields):
    found = SimpleNamespace(devices=list(devices))
    pipeline = SimpleNamespace(model=SimpleNamespace(huggingface_config=SimpleNamespace(**fields)))
    with mock.patch.object(GptOssConfig, "initialize", return_value=found):
        return message(lambda: PackedGptOssConfig.initialize(pipeline, max_seq_len=128))


def batched():
    model = SimpleNamespace(devices=[SimpleNamespace(is_host=True)], max_batch_size=2)
    return message(lambda: PackedModel.graph_specs(model, None))


def reserved(variables=None, **fields):
    """Return the GiB that are kept free of weights and KV cache for a config.json with `fields`."""
    settings = SimpleNamespace(num_local_experts=32, intermediate_size=2880, hidden_size=2880, **fields)
    own = object.__new__(architecture.PackedPlanner)
    with (
        mock.patch.dict("os.environ", variables or {}),
        mock.patch.object(memory_planner, "_select_quantization_encoding", return_value="float4_e2m1fnx2"),
    ):
        return own.estimate_activation_memory(SimpleNamespace(model=None), settings) >> 30


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


print(json.dumps({
    "as gpt-oss has it": finalized(),
    "experts in bfloat16": finalized(quant_config=None),
    "attention without biases": finalized(attention_bias=False),
    "one device": initialized(GPU),
    "two devices": initialized(GPU, GPU),
    "two devices for MAX's own experts": initialized(GPU, GPU, quantization_format="dequant"),
    "a CPU for MAX's own experts": initialized(CPU, quantization_format="dequant"),
    "two sequences": batched(),
    "another format": initialized(GPU, quantization_format="fp8"),
    "reserved": [
        reserved(), reserved(quantization_format="dequant"),
        reserved({architecture.SETTING: "packed"}, quantization_format="dequant"),
        reserved({architecture.SETTING: "dequant"}),
    ],
}))  # fmt: skip
