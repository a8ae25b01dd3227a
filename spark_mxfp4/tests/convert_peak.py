"""Convert a model of mostly experts; print bytes: one dense layer, peak and end above the start, all layers."""

import ctypes
import gc
from pathlib import Path

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from spark_mxfp4 import hf

LAYERS, EXPERTS = 8, 40  # all packed layers together have the size of two dense layers


def resident(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def make(layers, experts):
    config = GptOssConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=1, num_key_value_heads=1, num_local_experts=experts, num_experts_per_tok=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.bfloat16()


hf.convert_and_replace(make(1, 2))  # imports everything
gc.collect()
model = make(LAYERS, EXPERTS)
layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].mlp.experts.parameters())
trim = ctypes.CDLL(None).malloc_trim  # freed memory goes back to the system
trim(0)
start = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size so far (proc(5))
hf.convert_and_replace(model)
gc.collect()
peak = resident("VmHWM") - start
trim(0)
print(layer, peak, resident("VmRSS") - start, layer * LAYERS)
