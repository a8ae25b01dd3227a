"""Write gpt-oss checkpoints of any size with random bytes, a layer at a time, to measure loading."""

import json

import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

from spark_mxfp4.hf.quantizer import PackedConfig

SCALES = (118, 124)  # as in kernels/check.py: activations stay in range


def write(folder, *, device="cpu", deviation=0.02, **sizes):
    """Write a packed checkpoint with `sizes` (fields of `GptOssConfig`) to `folder`; return the bytes of one layer.

    The random bytes are the same each time, because other weights might give ties, or an end token at once.

    `deviation` is the standard deviation of all other weights, around 1 for norms and around 0 for the rest.
    """
    torch.manual_seed(0)
    config = GptOssConfig(**sizes)
    with torch.device("meta"):
        names = GptOssForCausalLM(config).state_dict()
    shards = {}
    for name, parameter in names.items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(f"model-{layer}.safetensors", []).append((name, parameter.shape))
    index, experts = {}, 0
    for file, members in shards.items():
        tensors = {}
        for name, shape in members:
            if name.endswith(("gate_up_proj", "down_proj")):
                blocks = (shape[0], shape[2], shape[1] // 32)
                packed = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8, device=device).cpu()
                tensors[f"{name}_blocks"] = packed
                tensors[f"{name}_scales"] = torch.randint(*SCALES, blocks, dtype=torch.uint8)
            else:
                tensors[name] = (torch.randn(shape, device=device) * deviation + ("norm" in name)).bfloat16().cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        experts = max(experts, sum(tensor.nbytes for name, tensor in tensors.items() if ".mlp.experts." in name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.quantization_config = PackedConfig().to_dict()
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    return experts
