"""Measures the accuracy of each dense format on a CPU: bits per byte and top-1 of the trained tiny model in vLLM.

`python -m lab.served.tiny_formats --out FILE.json` loads the model into vLLM's own engine once for each pair of formats
(attention, LM head) and scores the packaged text in chunks as the accuracy gate does. Run it in the serving
environment. Every figure is saved immediately, so that an interrupted run keeps its figures.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sparkforge.bench import baselines, gate
from sparkforge.bench.accuracy import CHUNK_TOKENS, LN2
from sparkforge.core.console import say
from sparkforge.core.files import write_json
from sparkforge.models import tiny
from sparkforge.serve.devices import in_environment

TEXT = "persuasion-24"
# Formats of attention and LM head; all other pairs are compared with the first.
PAIRS = (
    ("bf16", "bf16"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp8"), ("mxfp4", "mxfp4"), ("fp8", "fp8"), ("mxfp4", "bf16"),
    ("bf16", "mxfp4"), ("mxfp8", "bf16"), ("bf16", "mxfp8"),
)  # fmt: skip


def score(model: Path, text: str) -> tuple[float, list[int]]:
    """Return the bits per byte of `text`, and the likeliest token at each scored position, from vLLM as configured."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 (only the serving environment has it)
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415

    engine = LLM(
        model=str(model), dtype="bfloat16", quantization="spark-mxfp4", max_model_len=2 * CHUNK_TOKENS, max_num_seqs=4,
        enforce_eager=True,
    )  # fmt: skip
    tokens = engine.get_tokenizer().encode(text, add_special_tokens=False)
    chunks = [tokens[start : start + CHUNK_TOKENS] for start in range(0, len(tokens), CHUNK_TOKENS)]
    prompts: list[Any] = [{"prompt_token_ids": chunk} for chunk in chunks]
    answers = engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1), use_tqdm=False)
    total, likeliest = 0.0, list[int]()
    for chunk, answer in zip(chunks, answers, strict=True):
        for token, entries in zip(chunk[1:], answer.prompt_logprobs[1:], strict=True):
            total += entries[token].logprob
            likeliest.append(min(entries, key=lambda candidate: entries[candidate].rank))
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return -total / LN2 / len(text.encode()), likeliest


def main(arguments: Sequence[str]) -> int:
    """Measure every pair and write the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.served.tiny_formats", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args(arguments).out
    os.environ.update(in_environment.variables_of(in_environment.profile_named("")))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the formats below reach the engine
    passage = gate.passage(baselines.load(), TEXT)
    rows = list[dict[str, Any]]()
    with TemporaryDirectory() as folder:
        model = tiny.write_tiny(Path(folder) / "tiny")
        reference = list[int]()
        for linear, head in PAIRS:
            os.environ |= {"SPARK_MXFP4_LINEAR": linear, "SPARK_MXFP4_LM_HEAD": head}
            begun = time.monotonic()
            bits, likeliest = score(model, passage.text)
            reference = reference or likeliest
            same = sum(a == b for a, b in zip(reference, likeliest, strict=True))
            rows.append({
                "linear": linear, "lm_head": head, "bits_per_byte": round(bits, 5), "tokens": len(likeliest),
                "top1_agreement": round(same / len(likeliest), 5), "seconds": round(time.monotonic() - begun, 1),
            })  # fmt: skip
            write_json(out, {"text": TEXT, "text_sha256": passage.sha256, "rows": rows})
            say(f"{linear} · {head}: {bits:.4f} bits/byte, top-1 as in bf16 {same / len(likeliest):.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
