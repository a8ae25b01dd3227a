"""The KV cache types that vLLM's own selector accepts for gpt-oss on 12.1, with the backends that can be imported.

vLLM first tries FLASH_ATTN, which needs its compiled extensions, so the choice without a flag is not tested.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from sparkforge.core.process import run

pytestmark = pytest.mark.integration
PROGRAM = Path(__file__).with_name("claimed_cuda.py")
QUESTIONS = [(kv, backend) for kv in ("auto", "fp8", "fp8_e5m2", "nvfp4") for backend in ("FLASHINFER", "TRITON_ATTN")]


def test_an_fp8_kv_cache_keeps_flashinfer_and_nvfp4_is_refused():
    request = json.dumps({"capability": [12, 1], "questions": QUESTIONS})
    variables = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "VLLM_HAS_FLASHINFER_CUBIN": "1"}
    answers = json.loads(run([sys.executable, "-P", PROGRAM], stdin=request, env=variables).stdout.splitlines()[-1])
    chosen = dict(zip(QUESTIONS, answers, strict=True))
    for kv in ("auto", "fp8", "fp8_e5m2"):
        assert chosen[kv, "FLASHINFER"] == {"FULL": "FlashInferBackend", "SLIDING": "FlashInferBackend"}
        assert set(chosen[kv, "TRITON_ATTN"].values()) == {"TritonAttentionBackend"}
    for layers in ("FULL", "SLIDING"):
        assert "misreads an NVFP4 KV cache at head_size 64" in chosen["nvfp4", "FLASHINFER"][layers]
        assert "kv_cache_dtype not supported" in chosen["nvfp4", "TRITON_ATTN"][layers]
