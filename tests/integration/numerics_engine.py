"""Runs vLLM in this process on given prompts, plain and with faults, and writes every logprob as JSON.

Usage: numerics_engine.py MODEL PROMPTS.json OUT.json ENGINE... One process runs the engines after each other: importing
vLLM costs more than any of them.
"""

import gc
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",  # trace the model whole, but do not spend minutes in a C++ compiler
}  # fmt: skip

# vLLM reads the settings above when it is imported.
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from spark_mxfp4 import experts
from sparkforge.serve import forked_vllm  # noqa: F401 - the ranks are forks of this process

GENERATED = 8
PACKED = ("float32", "packed", "torch", False)
# Two ranks, each in a process of its own, that share the layers' columns or the experts. They are forked, so they come
# before this process has computed anything.
RANKS = {
    "two ranks, tensor": {"tensor_parallel_size": 2},
    "two ranks, expert": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
# name of the run → model dtype, mode, kernel, whether torch.compile traces the model
ENGINES = {
    **dict.fromkeys(RANKS, PACKED),
    "float32": PACKED,
    "float32 dequant padded": ("float32", "dequant", "numerics_kernels:Padded", False),
    "bfloat16": ("bfloat16", "packed", "torch", False),
    "float32 traced": ("float32", "packed", "torch", True),
}


@contextmanager
def clamp_removed(_model):
    kept = experts.swiglu
    experts.swiglu = lambda gate_up: kept(gate_up, limit=float("inf"))
    yield
    experts.swiglu = kept


@contextmanager
def changed(tensors, change):
    """Overwrite `tensors` by what `change` makes of each, and put them back."""
    tensors = [tensor.detach() for tensor in tensors]
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.copy_(change(tensor))
    yield
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.copy_(value)


def sinks_removed(model):
    sinks = [layer.attn.attn.impl.sinks for layer in model.model.layers]
    return changed(sinks, lambda sink: sink * 0 - 1e30)


def weights_of(model, *names):
    layers = [layer.mlp.experts.routed_experts for layer in model.model.layers]
    return [getattr(layer, name).data for layer in layers for name in names]


def nibbles_swapped(model):
    return changed(weights_of(model, "w13_weight", "w2_weight"), lambda byte: byte << 4 | byte >> 4)


def scale_off_by_one(model):
    return changed(weights_of(model, "w13_weight_scale"), lambda scale: scale + 1)


FAULTS = {f.__name__: f for f in (clamp_removed, sinks_removed, nibbles_swapped, scale_off_by_one)}


def complete(llm, prompts):
    """Return, per prompt, all token ids and the logprob of each token but the first."""
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    results = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        results.append({"ids": ids, "logprobs": [s[i].logprob for s, i in zip(steps, ids[1:], strict=True)]})
    return results


def run(model, prompts, dtype, mode, kernel, traced, *, faults=False, **ranks):
    os.environ |= {"SPARK_MXFP4_MODE": mode, "SPARK_MXFP4_KERNEL": kernel}
    llm = LLM(
        model, dtype=dtype, quantization="spark-mxfp4", max_model_len=512, max_num_seqs=4, enforce_eager=not traced,
        enable_prefix_caching=False, distributed_executor_backend="mp" if ranks else "uni", disable_log_stats=True,
        skip_tokenizer_init=True, **ranks,  # ids go in and come out; transformers takes 3 s for each tokenizer it loads
    )  # fmt: skip
    results, loaded = {"": complete(llm, prompts)}, []
    if faults:
        llm.apply_model(loaded.append)
        for name, fault in FAULTS.items():
            with fault(loaded[0]):
                results[name] = complete(llm, prompts)
        results["again"] = complete(llm, prompts)  # every fault was taken back
    del llm, loaded
    gc.collect()
    cleanup_dist_env_and_memory()
    return results


def main(model, prompts_file, out, *names):
    prompts = json.loads(Path(prompts_file).read_text())
    results = {
        name: run(model, prompts, *engine, faults=name == "float32", **RANKS.get(name, {}))
        for name, engine in ENGINES.items()
        if name in names
    }
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
