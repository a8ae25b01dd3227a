"""Runs vLLM with two ranks, each in a process of its own, and writes what it generated as JSON.

Usage: parallel_engine.py MODEL PROMPTS.json OUT.json WAY, where WAY is `tensor` or `expert`.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_HOST_IP": "127.0.0.1",
}  # fmt: skip

# vLLM reads the settings above when it is imported.
from numerics_engine import complete
from vllm import LLM


def main(model, prompts_file, out, way):
    llm = LLM(
        model, dtype="float32", quantization="spark-mxfp4", max_model_len=512, max_num_seqs=4, enforce_eager=True,
        enable_prefix_caching=False, tensor_parallel_size=2, enable_expert_parallel=way == "expert",
        disable_log_stats=True,
    )  # fmt: skip
    Path(out).write_text(json.dumps(complete(llm, json.loads(Path(prompts_file).read_text()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
