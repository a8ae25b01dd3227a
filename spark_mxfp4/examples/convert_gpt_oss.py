"""Load a gpt-oss checkpoint dequantised, generate, convert its experts to packed MXFP4, and generate again.

    python docs/examples/convert_gpt_oss.py openai/gpt-oss-20b --device cuda
    python docs/examples/convert_gpt_oss.py openai/gpt-oss-20b --device cuda --kernel hub:FOLDER

With `hub:FOLDER`, or `hub:PACKAGE`, a fork of triton_kernels quantises and multiplies.

The first tokens are transformers' own, from dequantised weights; the second are from the packed experts. The last line
says whether they are the same. In bfloat16 sums are rounded, so a near tie can be decided differently.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config, PreTrainedModel

from spark_mxfp4 import hf


def generate(model: PreTrainedModel, ids: torch.Tensor, count: int) -> list[int]:
    """Return the tokens that `model` adds greedily to `ids` [1, T]."""
    tokens = model.generate(ids.to(model.device), max_new_tokens=count, do_sample=False)
    added: list[int] = tokens[0, ids.shape[1] :].tolist()
    return added


def expert_bytes(model: PreTrainedModel) -> int:
    """Return the memory of all experts' weights."""
    return sum(weight.nbytes for name, weight in model.state_dict().items() if ".experts." in name)


def main() -> None:
    """Run the example; ends with 1 if the tokens differ."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("model", help="folder or hub id of a gpt-oss checkpoint in MXFP4")
    flags.add_argument("--device", default="cpu", help="where to load it: cpu (default), cuda")
    flags.add_argument("--kernel", help="a name for spark_mxfp4.registry.load; default: triton on cuda, torch on cpu")
    flags.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of all other weights")
    flags.add_argument("--prompt", default="It is a truth universally acknowledged, that")
    flags.add_argument("--tokens", type=int, default=16, help="how many to generate")
    flags.add_argument("--save", help="folder to write the converted checkpoint to")
    arguments = flags.parse_args()

    ids = AutoTokenizer.from_pretrained(arguments.model)(arguments.prompt, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, quantization_config=Mxfp4Config(dequantize=True), device_map=arguments.device
    )
    model = model.to(getattr(torch, arguments.dtype)).eval()
    dense = generate(model, ids, arguments.tokens)
    print(f"dequantised by transformers: {expert_bytes(model) / 1e6:.1f} MB of experts · tokens {dense}")

    hf.convert_and_replace(model, arguments.kernel)
    packed = generate(model, ids, arguments.tokens)
    print(f"packed by spark_mxfp4: {expert_bytes(model) / 1e6:.1f} MB of experts · tokens {packed}")
    if arguments.save:
        model.save_pretrained(arguments.save)
    if dense != packed:
        sys.exit("the tokens differ")
    print("the same tokens")


if __name__ == "__main__":
    main()
