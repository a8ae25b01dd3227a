"""Loads a packed checkpoint for a kernel with a layout of its own; prints bytes: one packed layer, peak, end, all layers.

Only anonymous memory counts: pages of the checkpoint's file that are mapped go when they are needed.
"""

import ctypes
import gc
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

from spark_mxfp4 import hf
from spark_mxfp4.hf.quantizer import PackedConfig

LAYERS, EXPERTS, SIZE = 6, 32, 512


def anonymous():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def write(folder, layers, experts):
    """A checkpoint that is mostly experts, with random bytes, written a layer at a time."""
    config = GptOssConfig(
        vocab_size=64, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=1, num_key_value_heads=1, num_local_experts=experts, num_experts_per_tok=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            rows = parameter.shape[2]
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, SIZE // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, rows, SIZE // 32), dtype=torch.uint8)
        else:
            tensors[name] = torch.randn(parameter.shape).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = PackedConfig().to_dict() | {"quant_method": "mxfp4"}
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    return sum(tensor.nbytes for name, tensor in tensors.items() if ".layers.0.mlp.experts." in name)


class Peak(threading.Thread):
    """The most anonymous memory that was seen, every 0.2 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.ended = 0, False

    def run(self):
        while not self.ended:
            self.most = max(self.most, anonymous())
            time.sleep(0.0002)


folder, kernel = Path(sys.argv[1]), sys.argv[2]
for name, sizes in (("small", (1, 2)), ("large", (LAYERS, EXPERTS))):
    (folder / name).mkdir()
    layer = write(folder / name, *sizes)
hf.load_packed(str(folder / "small"), kernel, device="cpu")  # so that everything is imported
gc.collect()
trim = ctypes.CDLL(None).malloc_trim  # freed memory goes back to the system
trim(0)
start, peak = anonymous(), Peak()
peak.start()
model = hf.load_packed(str(folder / "large"), kernel, device="cpu")
peak.ended = True
peak.join()
gc.collect()
trim(0)
print(layer, peak.most - start, anonymous() - start, layer * LAYERS)
