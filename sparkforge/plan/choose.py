"""Choose the serve profile for a load on a device, with its formats, and give the reason against each of the others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparkforge.core.errors import InputError
from sparkforge.core.files import DocumentError, parse_json
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import SHARE, flag_value
from sparkforge.plan import budget
from sparkforge.plan.architecture import BF16, Architecture, DenseFormat
from sparkforge.plan.budget import BATCHED_TOKENS, DEFAULT_UTILIZATION, SEQUENCES, Workload
from sparkforge.plan.devices import GIB, Device

CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
PAIRS = (("fp8", "bf16"), ("fp8", "fp8"), ("mxfp4", "fp8"), ("mxfp4", "mxfp4"))
COMPARED = (BF16, *(DenseFormat(*pair) for pair in PAIRS))
# vLLM's flag (vllm/config/quantization.py, QuantizationConfigArgs) takes keys after a dot or in JSON. The key of the LM
# head is from our patch 0013.
CONFIG, LINEAR_KEY, HEAD_KEY = "--quantization-config", "linear", "lm_head"
# The variables of our plugin (spark_mxfp4.vllm.plugin), for --quantization spark-mxfp4.
LINEAR_VARIABLE, HEAD_VARIABLE = "SPARK_MXFP4_LINEAR", "SPARK_MXFP4_LM_HEAD"
# Prefix of a format's name → its key in BITS. Other formats, such as int8, are counted as bf16.
NAMES = {"mxfp4": "mxfp4", "mxfp8": "mxfp8", "fp8": "fp8"}


class ServerOptions(Record):
    """A serve profile's arguments and environment variables as vLLM gets them."""

    about: str
    arguments: tuple[str, ...]
    variables: dict[str, str]

    def number(self, flag: str, default: float) -> float:
        """Return a flag's value. Raises InputError if it is not a number."""
        value = flag_value(self.arguments, flag)
        return default if value is None else _number(flag, value)

    def longest(self, default: int) -> int:
        """Return --max-model-len in tokens. Raises InputError if it is not a number."""
        return int(self.number("--max-model-len", default))

    @property
    def dense(self) -> DenseFormat:
        """Formats of the dense layers in memory: bf16 on a processor, where our plugin expands them."""
        return BF16 if self.for_processors else dense_format(self.arguments, self.variables)

    @property
    def for_processors(self) -> bool:
        """Whether the profile is for vLLM's CPU build."""
        return CPU_SPACE in self.variables

    def load(self, asked: Workload) -> Workload:
        """Return `asked` with this profile's bounds and formats. The KV cache is FP8 if the profile or `asked` says so.

        Raises InputError for a malformed number.
        """
        batched = int(self.number("--max-num-batched-tokens", BATCHED_TOKENS))
        kv = "fp8" if "fp8" in {asked.kv, kv_type(self.arguments)} else asked.kv
        sequences = int(self.number("--max-num-seqs", SEQUENCES))
        return replace(asked, batched=batched, sequences=sequences, kv=kv, dense=self.dense)


class ProfileFit(Record):
    """Whether a profile serves the workload; `against` is empty if it does. Shares are --gpu-memory-utilization."""

    name: str
    about: str
    share: float
    needed: float
    most: float
    max_model_len: int
    max_num_seqs: int
    dense: str
    kv: str
    against: tuple[str, ...]


def verdicts(
    model: Architecture, device: Device, asked: Workload, profiles: Mapping[str, ServerOptions]
) -> list[ProfileFit]:
    """Judge the device's profiles, the most cautious first. Raises InputError for a profile with a malformed number."""
    return [_verdict(name, profiles[name], model, device, asked) for name in candidates(device, profiles)]


def candidates(device: Device, profiles: Mapping[str, ServerOptions]) -> list[str]:
    """Return the profiles for the device: those of its row, then similar ones with fewer bits, in the table's order.

    Fewer bits trade accuracy for speed; only a bake-off shows whether the accuracy suffices.
    """
    first = [name for name in device.profiles if name in profiles]
    processors = any(profiles[name].for_processors for name in first)
    packed = []
    for name, profile in profiles.items():
        has_fewer_bits = profile.dense != BF16 or kv_type(profile.arguments) != "bf16"
        if name not in first and profile.for_processors == processors and has_fewer_bits:
            packed.append(name)
    return first + packed if first else []


def dense_formats(device: Device, profiles: Mapping[str, ServerOptions]) -> list[DenseFormat]:
    """Return the formats to compare, and those of the device's profiles."""
    return list(dict.fromkeys([*COMPARED, *(profiles[name].dense for name in candidates(device, profiles))]))


def _verdict(name: str, profile: ServerOptions, model: Architecture, device: Device, asked: Workload) -> ProfileFit:
    load, longest = profile.load(asked), profile.longest(model.longest)
    share = profile.number(SHARE, DEFAULT_UTILIZATION)
    most, needed = budget.most_share(device), budget.make(model, device, load).share
    objections = {
        f"--max-model-len is {longest}": asked.context > longest,
        f"--max-num-seqs is {load.sequences}": asked.concurrency > load.sequences,
    }
    if CPU_SPACE in profile.variables:
        space, cache = _number(CPU_SPACE, profile.variables[CPU_SPACE]), budget.kv_bytes(model, load) / GIB
        objections[f"the KV cache needs {cache:.1f} GiB, {CPU_SPACE} is {space:g}"] = cache > space
    else:
        # vLLM does not start unless one sequence of --max-model-len fits.
        least = budget.make(model, device, replace(load, context=longest, concurrency=1)).share
        objections |= {
            f"its share of {share:g} is more than the {most:.2f} available": share > most,
            f"one sequence of its --max-model-len needs a share of {least:.2f}, not {share:g}": least > share,
            f"this load needs a share of {needed:.2f}, not {share:g}": needed > share,
        }
    return ProfileFit(
        name=name,
        about=profile.about,
        share=share,
        needed=needed,
        most=most,
        max_model_len=longest,
        max_num_seqs=load.sequences,
        dense=load.dense.name,
        kv=load.kv,
        against=tuple(objection for objection, applies in objections.items() if applies),
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        failure, why = "sparkforge/serve/profiles.toml is malformed", f"{name} is {text!r}, not a number from 0"
        raise InputError(failure, why, "less sparkforge/serve/profiles.toml   # correct it", code="input.table")
    return value


def kv_type(arguments: Sequence[str]) -> str:
    """Return the type of the KV cache in a server's arguments, a key of KV_BYTES."""
    return "fp8" if (flag_value(arguments, "--kv-cache-dtype") or "auto").startswith("fp8") else "bf16"


def dense_format(arguments: Sequence[str], variables: Mapping[str, str]) -> DenseFormat:
    """Return the formats of the dense layers in a server's arguments and environment variables."""
    return DenseFormat(
        attention=_form(_chosen(variables, LINEAR_VARIABLE) or _named(arguments, LINEAR_KEY)),
        head=_form(_chosen(variables, HEAD_VARIABLE) or _named(arguments, HEAD_KEY)),
    )


def _chosen(variables: Mapping[str, str], name: str) -> str:
    """Return the plugin's format; empty for `bf16`, with which vLLM's own flag applies to the layers."""
    form = variables.get(name, "")
    return "" if form == BF16.attention else form


def _form(name: str) -> str:
    return next((form for begin, form in NAMES.items() if name.startswith(begin)), "bf16")


def _named(arguments: Sequence[str], key: str) -> str:
    """Return the format that vLLM's flag names for `key`; empty for none, and for a value that vLLM rejects."""
    flag = f"{CONFIG}.{key}".replace("_", "-")  # as flag_value reads it
    if name := flag_value(arguments, flag) or flag_value(arguments, f"{flag}.weight"):
        return name
    try:
        config = parse_json(flag_value(arguments, CONFIG) or "{}", CONFIG)
    except DocumentError:
        return ""
    value = config.get(key) if isinstance(config, dict) else ""
    return str(value.get("weight") if isinstance(value, dict) else value)
