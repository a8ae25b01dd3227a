"""Run vLLM in this process on given prompts and write every logprob as JSON.

Usage: numerics_engine.py MODEL PROMPTS.json OUT.json ENGINE... One process runs the engines one after another, because
importing vLLM takes longer than any of them.
"""

import gc
import json
import os
import sys
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

from sparkforge.serve import forked_vllm  # noqa: F401 - the ranks are forks of this process

GENERATED = 8
PACKED = ("float32", "packed", "torch", False)
# Two ranks in separate processes share the layers' columns or the experts. They are forked, so they must start before
# this process has computed anything.
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


def complete(llm, prompts):
    """Return, per prompt, all token ids and the logprob of each token but the first."""
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    results = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        results.append({"ids": ids, "logprobs": [s[i].logprob for s, i in zip(steps, ids[1:], strict=True)]})
    return results


def run(model, prompts, dtype, mode, kernel, traced, **ranks):
    os.environ |= {"SPARK_MXFP4_MODE": mode, "SPARK_MXFP4_KERNEL": kernel}
    llm = LLM(
        model, dtype=dtype, quantization="spark-mxfp4", max_model_len=512, max_num_seqs=4, enforce_eager=not traced,
        enable_prefix_caching=False, distributed_executor_backend="mp" if ranks else "uni", disable_log_stats=True,
        skip_tokenizer_init=True, **ranks,  # inputs and outputs are ids; loading a tokenizer takes 3 s
    )  # fmt: skip
    results = complete(llm, prompts)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return results


def main(model, prompts_file, out, *names):
    prompts = json.loads(Path(prompts_file).read_text())
    results = {
        name: run(model, prompts, *engine, **RANKS.get(name, {})) for name, engine in ENGINES.items() if name in names
    }
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
