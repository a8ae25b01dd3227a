"""The server that will start: the model's architecture, and the load that vLLM's arguments allow."""

import re

from sparkforge.core.errors import InputError
from sparkforge.core.vllm_flags import flag_value
from sparkforge.plan.architecture import BITS, KV_BLOCK, Architecture, DenseFormat, parse
from sparkforge.plan.budget import BATCHED_TOKENS, SEQUENCES, Workload
from sparkforge.plan.choose import kv_type
from validate.checks.finding import MODEL_FIX, FactMissing, View

LARGEST = 10**9
AUTO = ("auto", "-1")
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def architecture(view: View) -> Architecture:
    """Return the model's architecture. Raises FactMissing if the family is unknown."""
    try:
        return parse(view.table("model.config"), "config.json")
    except InputError as error:
        raise FactMissing(f"{error.what}: {error.why}", MODEL_FIX) from error


def load(view: View, model: Architecture) -> Workload:
    """Return the load that must fit when vLLM starts: one sequence of --max-model-len, and the limits of a step.

    Raises FactMissing for an unknown format or an argument that is not a number.
    """
    arguments = view.names("serve.args")
    return Workload(
        context=longest(arguments, model.longest),
        concurrency=1,
        kv=kv_type(arguments),
        dense=dense_format(view),
        batched=integer(arguments, "--max-num-batched-tokens", BATCHED_TOKENS),
        sequences=integer(arguments, "--max-num-seqs", SEQUENCES),
    )


def dense_format(view: View) -> DenseFormat:
    """Return the formats of attention and LM head. Raises FactMissing for unknown formats."""
    forms = view.names("serve.dense_format")
    if len(forms) != 2 or not set(forms) <= BITS.keys():
        raise FactMissing(f"serve.dense_format is {str(forms)[:80]}, not two known formats")
    return DenseFormat(*forms)


def longest(arguments: list[str], default: int) -> int:
    """Return --max-model-len in tokens; KV_BLOCK for `auto` and -1, with which vLLM chooses the longest that fits.

    Raises FactMissing if it is not a number.
    """
    value = (flag_value(arguments, "--max-model-len") or "").strip()
    return KV_BLOCK if value.lower() in AUTO else integer(arguments, "--max-model-len", default)


def integer(arguments: list[str], flag: str, default: int) -> int:
    """Return an integer flag's value: 8192, 8k, 8K (vllm/utils/argparse_utils.py:29). Raises FactMissing."""
    text = flag_value(arguments, flag)
    if text is None:
        return default
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kKmMgG]?)", text.strip())
    value = float(match[1]) * SUFFIXES[match[2]] if match else 0.0
    if not 1 <= value <= LARGEST:
        raise FactMissing(f"{flag} is {text[:40]!r}, not a number of tokens or sequences")
    return int(value)
