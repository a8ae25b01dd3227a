"""Prints as JSON the tokens that vLLM continues each prompt with: `vllm_tokens.py MODEL PROMPTS.json COUNT`.

Greedy, in float32, with our experts on packed bytes.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "SPARK_MXFP4_MODE": "packed", "SPARK_MXFP4_KERNEL": "torch",
}  # fmt: skip

# vLLM reads the settings above when it is imported.
from vllm import LLM, SamplingParams

model, prompts, count = sys.argv[1:]
llm = LLM(
    model, dtype="float32", quantization="spark-mxfp4", max_model_len=512, max_num_seqs=4, enforce_eager=True,
    distributed_executor_backend="uni", disable_log_stats=True, skip_tokenizer_init=True,
)  # fmt: skip
sampling = SamplingParams(temperature=0, max_tokens=int(count), ignore_eos=True, detokenize=False)
inputs = [{"prompt_token_ids": prompt} for prompt in json.loads(Path(prompts).read_text())]
outputs = llm.generate(inputs, sampling, use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
