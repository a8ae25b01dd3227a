"""What facts say of the server to come: the model's architecture, and what its arguments ask of the memory."""

from __future__ import annotations

import re

from sparkforge.errors import PlanInputError
from validate.architecture import KV_BLOCK, Architecture, parse
from validate.budget import BATCHED_TOKENS, SEQUENCES, Load
from validate.finding import MODEL_FIX, FactMissing, View
from validate.scene import argument

LARGEST = 10**9
AUTO = ("auto", "-1")
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def architecture(view: View) -> Architecture:
    """Return the model's architecture. Raises FactMissing for a configuration that is none of gpt-oss."""
    try:
        return parse(view.table("model.config"), "config.json")
    except PlanInputError as error:
        raise FactMissing(f"{error.what}: {error.why}", MODEL_FIX) from error


def load(view: View, model: Architecture) -> Load:
    """Return one sequence of --max-model-len, which vLLM wants room for at its start, with the bounds of its steps."""
    words = view.names("serve.args")
    return Load(
        context=longest(words, model.longest),
        concurrency=1,
        kv=kv_type(words),
        batched=whole(words, "--max-num-batched-tokens", BATCHED_TOKENS),
        sequences=whole(words, "--max-num-seqs", SEQUENCES),
    )


def kv_type(words: list[str]) -> str:
    """Return the type of the KV cache that a server's arguments ask for, a key of KV_BYTES."""
    return "fp8" if (argument(words, "--kv-cache-dtype") or "auto").startswith("fp8") else "bf16"


def longest(words: list[str], default: int) -> int:
    """Return --max-model-len; for `auto` or -1, where vLLM takes what fits, the least that it can be."""
    told = (argument(words, "--max-model-len") or "").strip()
    return KV_BLOCK if told.lower() in AUTO else whole(words, "--max-model-len", default)


def whole(words: list[str], flag: str, default: int) -> int:
    """Return the value of a flag among a server's arguments, which may be 8192, 8k (8,000) or 8K (8,192) as in vLLM.

    Raises FactMissing for one that is none of these, or makes no sense (vllm/utils/argparse_utils.py:29).
    """
    told = argument(words, flag)
    if told is None:
        return default
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kKmMgG]?)", told.strip())
    value = float(match[1]) * SUFFIXES[match[2]] if match else 0.0
    if not 1 <= value <= LARGEST:
        raise FactMissing(f"{flag} is {told[:40]!r}, which is no number of tokens or sequences")
    return int(value)
