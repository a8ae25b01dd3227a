"""`./inv plan`: what a model needs of a device, what fits, how fast it can be at best, and which serve profile to take.

A plan is computed from sizes and cited figures; measured is only what `--device this` reads of the machine.
`python3 -m validate.plan` prints `plan.schema.json`, made from `plan_document`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge import paths
from sparkforge.errors import ModelTooLargeError, PlanInputError, UsageError
from validate import architecture, budget, choose, cited, devices, measured, roofline, speed
from validate.architecture import KV_BYTES, Architecture
from validate.budget import Load
from validate.choose import Profile, Verdict
from validate.devices import GIB, Device
from validate.plan_document import (
    Asked,
    BudgetRow,
    DecodeRow,
    DeviceRow,
    Fit,
    KvRow,
    MeasuredRow,
    ModelRow,
    Plan,
    PrefillRow,
    WeightRow,
)
from validate.tables import TOLD

BATCHES = (1, 4, 16)  # of the decode table, beside the one that was asked for
PROMPTS = (1024, 8192)  # of the prefill table, beside the context
CITED_MODEL, CITED_GPU, CITED_NAMES = "gpt-oss-120b", "GB10", "Spark"
MOST_SEQUENCES = 100_000
DEFAULT_CONTEXT, DEFAULT_CONCURRENCY = 8192, "4"


@dataclass(frozen=True)
class Subject:
    """A model to plan for."""

    name: str
    source: str
    model: Architecture
    on_disk: int | None = None
    on_disk_source: str = ""


def subject(told: str, known: Mapping[str, Any]) -> Subject:
    """Return the model of a name in `known` (serve/models.toml), a folder, or a config.json. Raises PlanInputError."""
    name = told.removeprefix("openai/")
    if name in known:
        row = known[name]
        model = architecture.parse(row.config, f"serve/models.toml, {name}")
        return Subject(name, row.source, model, row.tensor_bytes, row.tensor_bytes_source)
    try:
        path = Path(told).expanduser()
        there = path.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, a home that nobody has, a byte that no name has
        there = False
    if not there:
        why = f"it is no folder, no file, and none of {', '.join(known)}"
        raise PlanInputError(f"there is no model {told[:200]!r}", why, architecture.GET)
    model = architecture.read(path)
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")] if path.is_dir() else []
    folder = path if path.is_dir() else path.parent
    on_disk = sum(sizes) or None
    return Subject(folder.resolve().name, str(path), model, on_disk, "sizes of its safetensors files" if sizes else "")


def asked(words: Mapping[str, str], model: Architecture, on: Device, profiles: Mapping[str, Profile]) -> Load:
    """Return what is to be served from words. Raises UsageError for what has no meaning."""
    lengths = [profiles[name].longest(model.longest) for name in on.profiles if name in profiles]
    usual = min(DEFAULT_CONTEXT, max(lengths, default=model.longest), model.longest)
    context = _whole("--context", words["context"] or str(usual), model.longest)
    concurrency = _whole("--concurrency", words["concurrency"] or DEFAULT_CONCURRENCY, MOST_SEQUENCES)
    kv = words["kv_dtype"]
    if kv not in ("auto", *KV_BYTES):
        raise UsageError(f"--kv-dtype {kv!r} is not known", f"there are auto, {', '.join(KV_BYTES)}", "--kv-dtype auto")
    return Load(context, concurrency, "bf16" if kv == "auto" else kv, sequences=concurrency)


def device(name: str, resident: str) -> Device:
    """Return the device, with `resident` GB (10^9 bytes) in use by others if that is told. Raises UsageError."""
    chosen = devices.choose(name)
    if not resident:
        return chosen
    try:
        value = float(resident)
    except ValueError:
        value = -1.0
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"--resident {resident} has no meaning", "it is a number of GB from 0", "--resident 6")
    figure = chosen.resident.model_copy(update={"value": value * 1e9 / GIB, "source": f"{TOLD} by --resident"})
    return chosen.model_copy(update={"resident": figure})


def make(of: Subject, name: str, on: Device, load: Load, profiles: Mapping[str, Profile]) -> Plan:
    """Return the plan. Raises PlanTableError for a table that is malformed."""
    model = of.model
    found = choose.verdicts(model, on, load, profiles)
    chosen = choose.recommended(found)
    nearest = chosen or min(found, key=lambda verdict: len(verdict.against), default=None)
    if chosen:  # else the step is vLLM's own, for as many sequences as were asked for
        load = profiles[chosen.name].load(load)
    made = budget.make(model, on, load)
    return Plan(
        asked=_asked(load, on),
        model=_model(of),
        device=DeviceRow(name=name, described=on),
        weights=[WeightRow(name=p.name, form=p.form, bytes=p.bytes) for p in model.parts()],
        kv=_kv(model, load),
        memory_bytes=made.total,
        budget=[BudgetRow(name=n.name, bytes=n.bytes, share=n.share, how=n.how) for n in made.lines],
        left_bytes=made.left,
        fit=_fit(model, on, load),
        decode=[_decode(model, on, load, batch) for batch in sorted({*BATCHES, load.concurrency})],
        prefill=[_prefill(model, on, load, n) for n in sorted({*PROMPTS, load.context}) if n <= model.longest],
        profiles=found,
        recommended=chosen.name if chosen else "",
        advice=_advice(model, on, load, chosen, nearest),
        cited=cited.against(model, on, CITED_NAMES) if of.name == CITED_MODEL and CITED_GPU in on.names else [],
        measured=_measured(of, on, load) if name == devices.THIS else [],
    )


def require_fit(plan: Plan) -> None:
    """Raise ModelTooLargeError if what was asked for does not fit, with how much is missing and what to change."""
    if plan.fit.fits:
        return
    asked_for = f"{plan.asked.concurrency} x {plan.asked.context} tokens"
    needed, most = (share * plan.memory_bytes / GIB for share in (plan.fit.needed_share, plan.fit.most_share))
    raise ModelTooLargeError(
        f"{plan.model.name} with {asked_for} does not fit {plan.device.described.about}",
        f"{plan.fit.missing_bytes / GIB:.1f} GiB are missing: vLLM's part needs {needed:.1f}, it can have {most:.1f}",
        plan.advice,
    )


def schema() -> str:
    """Return `plan.schema.json` as it must be."""
    return json.dumps(Plan.model_json_schema(), indent=2, sort_keys=True) + "\n"


def _asked(load: Load, on: Device) -> Asked:
    resident = int(on.resident.value * GIB)
    return Asked(context=load.context, concurrency=load.concurrency, kv=load.kv, resident_bytes=resident)


def _model(of: Subject) -> ModelRow:
    return ModelRow(
        name=of.name,
        source=of.source,
        computed=of.model.weight_bytes(),
        on_disk=of.on_disk,
        on_disk_source=of.on_disk_source,
    )


def _whole(flag: str, text: str, most: int) -> int:
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
    if not 0 < value <= most:
        raise UsageError(f"{flag} {text} has no meaning here", f"it takes a whole number from 1 to {most}", f"{flag} 1")
    return value


def _measured(of: Subject, on: Device, load: Load) -> list[MeasuredRow]:
    found = measured.newest(paths.state() / "bench", of.name)
    if found is None or not on.names:
        return []
    got = measured.flat(*found)
    speeds = speed.Measured(**{name: got[name] for name in measured.SHAPE}, kv=load.kv, batched=load.batched)
    return [
        MeasuredRow(told=f"{got['file']}: {c.told}", measured=c.measured, computed=c.computed, causes=c.causes)
        for c in speed.compare(of.model, on, speeds)
    ]


def _kv(model: Architecture, load: Load) -> list[KvRow]:
    token, kept = model.kv_layer_token(load.kv), min(load.context, model.window)
    rows = (("full attention", model.full_layers, load.context), ("sliding window", model.sliding_layers, kept))
    return [
        KvRow(
            layers=name,
            count=count,
            layer_token_bytes=token,
            tokens_kept=tokens,
            sequence_bytes=count * tokens * token,
        )
        for name, count, tokens in rows
    ]


def _fit(model: Architecture, on: Device, load: Load) -> Fit:
    missing = budget.missing(model, on, load)
    return Fit(
        fits=budget.fits(model, on, load),
        missing_bytes=max(0, missing),
        needed_share=budget.make(model, on, load).share,
        most_share=budget.most_share(on),
        most_sequences=budget.most_sequences(model, on, load),
        most_tokens=budget.most_tokens(model, on, load),
    )


def _decode(model: Architecture, on: Device, load: Load, batch: int) -> DecodeRow:
    took = roofline.time(roofline.decode(model, batch, load.context, load.kv, "bf16"), on)
    same = roofline.decode(model, batch, load.context, load.kv, "bf16", touched=model.top_k)
    best, seconds = roofline.time(same, on).seconds, took.seconds
    return DecodeRow(
        batch=batch,
        context=load.context,
        experts=roofline.experts_touched(model.experts, model.top_k, batch),
        bytes=int(took.work.bytes),
        intensity=took.work.intensity,
        bound=took.bound,
        seconds=seconds,
        each=1 / seconds if seconds else None,
        total=batch / seconds if seconds else None,
        best_total=batch / best if best else None,
    )


def _prefill(model: Architecture, on: Device, load: Load, prompt: int) -> PrefillRow:
    works = list(roofline.prefill(model, prompt, 1, load.batched, load.kv))
    seconds = roofline.first_token_seconds(model, on, prompt, 1, load.batched, load.kv)
    bounds = {roofline.time(work, on).bound for work in works}
    return PrefillRow(
        prompt=prompt,
        chunk=load.batched,
        intensity=sum(work.flops for work in works) / sum(work.bytes for work in works),
        bound=" and ".join(sorted(bounds)),
        seconds=seconds,
        rate=prompt / seconds if seconds else None,
    )


def _advice(model: Architecture, on: Device, load: Load, chosen: Verdict | None, nearest: Verdict | None) -> str:
    """Say the next command, or what to change, in one line."""
    if not budget.fits(model, on, load):
        return _smaller(model, on, load)
    if chosen:
        return "./inv up" if "embedded" in on.profiles else f"./inv up --device docker --profile {chosen.name}"
    if nearest is None:
        return "serve/profiles.toml has no profile for this device; its flags are for a Spark and for processors"
    against = "; ".join(nearest.against)
    return f"ask for less, or change {nearest.name} in serve/profiles.toml, the nearest profile: {against}"


def _smaller(model: Architecture, on: Device, load: Load) -> str:
    sequences, tokens = budget.most_sequences(model, on, load), budget.most_tokens(model, on, load)
    half = Load(load.context, load.concurrency, "fp8", load.batched, load.sequences)
    ways = [f"--concurrency {sequences}"] if sequences else []
    ways += [f"--context {tokens}"] if tokens else []
    ways += ["--kv-dtype fp8"] if load.kv != "fp8" and budget.fits(model, on, half) else []
    return "./inv plan with " + " or ".join(ways) if ways else "a smaller model, such as ./inv plan gpt-oss-20b"


if __name__ == "__main__":
    sys.stdout.write(schema())
