"""Which serve profile fits a load on a device, and what speaks against each of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparkforge.errors import PlanTableError
from validate import budget
from validate.architecture import Architecture
from validate.budget import BATCHED_TOKENS, SEQUENCES, Load
from validate.devices import GIB, Device
from validate.scene import DEFAULT_UTILIZATION, argument
from validate.tables import Record

CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"


class Profile(Record):
    """A serve profile's flags and variables as vLLM gets them."""

    about: str
    words: tuple[str, ...]
    variables: dict[str, str]

    def number(self, flag: str, default: float) -> float:
        """Return a flag's value. Raises PlanTableError for one that is no number."""
        told = argument(self.words, flag)
        return default if told is None else _number(flag, told)

    def longest(self, default: int) -> int:
        """Return --max-model-len."""
        return int(self.number("--max-model-len", default))

    def load(self, asked: Load) -> Load:
        """Return what was asked for under this profile's bounds of a step."""
        batched = int(self.number("--max-num-batched-tokens", BATCHED_TOKENS))
        return replace(asked, batched=batched, sequences=int(self.number("--max-num-seqs", SEQUENCES)))


class Verdict(Record):
    """Whether a profile serves what was asked for; if so, `against` is empty. Shares are --gpu-memory-utilization."""

    name: str
    about: str
    share: float
    needed: float
    most: float
    max_model_len: int
    max_num_seqs: int
    against: tuple[str, ...]


def verdicts(model: Architecture, device: Device, asked: Load, profiles: Mapping[str, Profile]) -> list[Verdict]:
    """Judge the profiles that are made for the device, in the order of its row."""
    return [_verdict(name, profiles[name], model, device, asked) for name in device.profiles if name in profiles]


def recommended(found: Sequence[Verdict]) -> Verdict | None:
    """Return the first profile that nothing speaks against: they stand in the order of caution."""
    return next((verdict for verdict in found if not verdict.against), None)


def _verdict(name: str, profile: Profile, model: Architecture, device: Device, asked: Load) -> Verdict:
    load, longest = profile.load(asked), profile.longest(model.longest)
    sequences = load.sequences
    share = profile.number("--gpu-memory-utilization", DEFAULT_UTILIZATION)
    most, needed = budget.most_share(device), budget.make(model, device, load).share
    against = [f"--max-model-len is {longest}"] if asked.context > longest else []
    if asked.concurrency > sequences:
        against.append(f"--max-num-seqs is {sequences}")
    against += (
        _against_space(model, load, profile)
        if CPU_SPACE in profile.variables
        else _against_share(model, device, replace(load, context=longest, concurrency=1), share, needed)
    )
    return Verdict(
        name=name,
        about=profile.about,
        share=share,
        needed=needed,
        most=most,
        max_model_len=longest,
        max_num_seqs=sequences,
        against=tuple(against),
    )


def _against_share(model: Architecture, device: Device, start: Load, share: float, needed: float) -> list[str]:
    """`start` is the one sequence of --max-model-len for which vLLM wants room before it serves at all."""
    most, least = budget.most_share(device), budget.make(model, device, start).share
    said = {
        f"its share of {share:g} is more than the {most:.2f} that can be had": share > most,
        f"one sequence of its --max-model-len needs a share of {least:.2f}, it has {share:g}": least > share,
        f"this needs a share of {needed:.2f}, it has {share:g}": needed > share,
    }
    return [words for words, true in said.items() if true]


def _against_space(model: Architecture, load: Load, profile: Profile) -> list[str]:
    space = _number(CPU_SPACE, profile.variables[CPU_SPACE])
    needed = budget.kv_bytes(model, load) / GIB
    return [] if needed <= space else [f"the KV cache needs {needed:.1f} GiB, {CPU_SPACE} is {space:g}"]


def _number(name: str, told: str) -> float:
    try:
        value = float(told)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        why = f"{name} is {told!r}, which is no number from 0"
        raise PlanTableError("serve/profiles.toml is malformed", why, "edit serve/profiles.toml")
    return value
