"""`./inv plan`: a model's memory on a device, the workload that fits, the highest speed, and the serve profile to use.

A plan is computed from sizes and cited figures. Only `--device this` reads the machine.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkforge.core.errors import InputError, RefusalError, UsageError
from sparkforge.core.program import parse_whole
from sparkforge.core.tables import TOLD
from sparkforge.plan import (
    architecture,
    budget,
    choose,
    cluster,
    devices,
    document,
    families,
    forecast,
    roofline,
    speed,
)
from sparkforge.plan.architecture import KV_BYTES, Architecture, DenseFormat, Draft, KnownModel
from sparkforge.plan.budget import Workload
from sparkforge.plan.choose import ProfileFit, ServerOptions
from sparkforge.plan.devices import GIB, Device
from sparkforge.plan.document import Plan
from sparkforge.plan.speed import CitedFigure, Measured

BATCHES = (1, 4, 16)  # of the decode table, besides the requested one
USERS = (1, 4, 16, 64)  # of the tables of formats, of profiles and of speculation
ACCEPTED = (1.7, 2.4, 3.2, 4.4, 6.3)  # average tokens gained per step, including the model's own
PROMPTS = (1024, 8192)  # of the prefill table, besides the context
MOST_DRAFTED = 32  # tokens a step; published drafts propose up to 16
MOST_SEQUENCES = 100_000
PROFILES = "sparkforge/serve/profiles.toml"
DEFAULT_CONTEXT, DEFAULT_CONCURRENCY = 8192, "4"


@dataclass(frozen=True)
class PlanRequest:
    """The options of `./inv plan` as the user wrote them; empty: the default."""

    model: str
    device: str = "spark"
    context: str = ""
    concurrency: str = ""
    kv_dtype: str = "auto"
    resident: str = ""
    nodes: str = ""
    draft: str = ""


@dataclass(frozen=True)
class Subject:
    """A model to plan for; `measured` is its newest speed on this machine's GPU."""

    name: str
    source: str
    model: Architecture
    on_disk: int | None = None
    recipe: str = ""
    drafts: Mapping[str, Draft] = field(default_factory=dict)
    measured: Measured | None = None


def read_subject(name: str, known: Mapping[str, KnownModel]) -> Subject:
    """Return the model: a name in `known`, a folder, or a config.json. Raises InputError."""
    name = next((own for own, row in known.items() if row.repository == name), name) if "/" in name else name
    if (row := known.get(name)) is not None:
        model = architecture.parse(row.config, f"sparkforge/recipes/{name}.toml")
        return Subject(name, row.source, model, row.tensor_bytes, name, row.drafts)
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, a NUL in it, an unknown user's home
        exists = False
    if not exists:
        why = f"it is neither a file or folder nor one of {', '.join(known)}"
        raise InputError(f"there is no model {name[:200]!r}", why, families.LIST, code="input.config")
    model = architecture.read(path)
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")] if path.is_dir() else []
    folder = path if path.is_dir() else path.parent
    return Subject(folder.resolve().name, str(path), model, sum(sizes) or None)


def read_load(
    request: PlanRequest, model: Architecture, device: Device, profiles: Mapping[str, ServerOptions]
) -> Workload:
    """Return the workload. Raises UsageError for an impossible option, InputError for a malformed profile."""
    lengths = [profiles[name].longest(model.longest) for name in device.profiles if name in profiles]
    usual = min(DEFAULT_CONTEXT, max(lengths, default=model.longest), model.longest)
    context = parse_whole(request.context or str(usual), "--context", 1, model.longest)
    concurrency = parse_whole(request.concurrency or DEFAULT_CONCURRENCY, "--concurrency", 1, MOST_SEQUENCES)
    kv = request.kv_dtype
    if kv not in ("auto", *KV_BYTES):
        raise UsageError(f"--kv-dtype {kv!r} is not known", f"choose auto, {', '.join(KV_BYTES)}", "--kv-dtype auto")
    return Workload(context, concurrency, "bf16" if kv == "auto" else kv, sequences=concurrency)


def read_draft(name: str, subject: Subject) -> Draft | None:
    """Return the draft of --draft NAME or NAME:TOKENS; None if empty. Raises UsageError for an unknown draft."""
    known = {**speed.judging().drafts, **subject.drafts}
    row, number = (known.get(name.partition(":")[0]), name.partition(":")[2]) if name else (None, "")
    if name and row is None:
        why = f"{subject.name} has {', '.join(known)}"
        raise UsageError(f"--draft {name[:80]!r} is not known", why, f"--draft {next(iter(known))}")
    if row is None or ":" not in name:
        return row
    tokens = parse_whole(number, f"--draft {row.method}:TOKENS, TOKENS", 1, MOST_DRAFTED)
    return row.model_copy(update={"tokens": tokens, "passes": tokens if row.passes == row.tokens else row.passes})


def read_device(name: str, resident: str, gpu: str) -> Device:
    """Return the device; unless `resident` is empty, other programs use that many GB (10^9 bytes) of its memory.

    `gpu` is the name of this machine's GPU, for the device `this`. Raises UsageError for an unknown device or GPU, or
    an invalid `resident`.
    """
    device = devices.this_machine(gpu) if name == devices.THIS else devices.named(name)
    if not resident:
        return device
    try:
        value = float(resident)
    except ValueError:
        value = -1.0
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"--resident {resident} is not valid", "it takes a number of GB from 0", "--resident 6")
    figure = device.resident.model_copy(update={"value": value * 1e9 / GIB, "source": f"{TOLD} by --resident"})
    return device.model_copy(update={"resident": figure})


def make_plan(
    subject: Subject,
    device: Device,
    load: Workload,
    profiles: Mapping[str, ServerOptions],
    request: PlanRequest,
    figures: Sequence[CitedFigure] = (),
) -> Plan:
    """Return the plan; `figures` are published by others. With `request.nodes` it also covers that many machines.

    Raises InputError for a malformed table, UsageError for an invalid `request.nodes` or a device whose network is not
    known.
    """
    nodes = parse_whole(request.nodes, "--nodes", 2, cluster.MOST_NODES) if request.nodes else 0
    model = subject.model
    verdicts = choose.verdicts(model, device, load, profiles)
    # The verdicts are in order of caution, the most cautious profile first.
    recommended = next((verdict for verdict in verdicts if not verdict.against), None)
    nearest = recommended or min(verdicts, key=lambda verdict: len(verdict.against), default=None)
    if recommended:  # otherwise a step has vLLM's default size, and as many sequences as requested
        load = profiles[recommended.name].load(load)
    memory = budget.make(model, device, load)
    caches = []
    for kv in KV_BYTES:
        count, size = budget.most_sequences(model, device, replace(load, kv=kv)), model.kv_token(kv)
        caches.append(document.CacheRow(kv=kv, token_bytes=size, sequences=count, tokens=count * load.context))
    size, disk = model.weight_bytes(), subject.on_disk
    row = document.ModelRow(name=subject.name, source=subject.source, computed=size, on_disk=disk)
    cited = speed.judging().cited
    is_cited = subject.name == cited.model and cited.gpu in device.names
    return Plan(
        asked=document.Asked(context=load.context, concurrency=load.concurrency, kv=load.kv),
        model=row,
        device=document.DeviceRow(name=request.device, described=device),
        weights=[document.WeightRow(name=p.name, form=p.form, bytes=p.bytes) for p in model.parts(load.dense)],
        memory_bytes=memory.total,
        budget=memory.lines,
        left_bytes=memory.left,
        fit=document.Capacity(
            fits=budget.fits(model, device, load),
            missing_bytes=max(0, budget.missing(model, device, load)),
            needed_share=memory.share,
            most_share=budget.most_share(device),
            most_sequences=budget.most_sequences(model, device, load),
            most_tokens=budget.most_tokens(model, device, load),
        ),
        decode=[_decode(model, device, load, batch) for batch in sorted({*BATCHES, load.concurrency})],
        prefill=[_prefill(model, device, load, n) for n in sorted({*PROMPTS, load.context}) if n <= model.longest],
        few_tokens=forecast.few_tokens(model, device),
        formats=[_format(model, device, load, profiles, dense) for dense in choose.dense_formats(device, profiles)],
        caches=caches,
        profiles=verdicts,
        recommended=recommended.name if recommended else "",
        advice=_advice(subject, device, load, recommended, nearest),
        cited=speed.against(model, device, figures) if is_cited else [],
        measured=list(speed.compare(model, device, subject.measured, load)) if subject.measured else [],
        cluster=cluster.make(model, device, load, nodes) if nodes else None,
        speculation=_speculation(model, device, load, profiles, load.draft) if load.draft else None,
    )


def require_speed(plan: Plan) -> None:
    """Raise RefusalError if the last measured speed is below the threshold that indicates a fault (plan.toml)."""
    if slow := next((row for row in plan.measured if row.refused), None):
        why, code = f"{slow.told}; likely: {slow.causes}", "validation.slow"
        raise RefusalError("this machine is far slower than its memory allows", why, "./inv doctor", code=code)


def require_fit(plan: Plan) -> None:
    """Raise RefusalError if the request does not fit; the error has the missing memory and the change to make."""
    if plan.fit.fits or (plan.cluster and any(row.fits for row in plan.cluster.ways)):
        return
    asked_for = f"{plan.asked.concurrency} x {plan.asked.context} tokens"
    needed, most = (share * plan.memory_bytes / GIB for share in (plan.fit.needed_share, plan.fit.most_share))
    failure = f"{plan.model.name} with {asked_for} does not fit {plan.device.described.about}"
    why = f"{plan.fit.missing_bytes / GIB:.1f} GiB are missing: vLLM needs {needed:.1f} and can have {most:.1f}"
    raise RefusalError(failure, why, plan.advice, code="validation.too-large")


def _decode(model: Architecture, device: Device, load: Workload, batch: int) -> document.DecodeRow:
    time = roofline.time(roofline.decode(model, batch, load), device)
    same = roofline.decode(model, batch, load, touched=model.top_k)
    best, seconds = roofline.time(same, device).seconds, time.seconds
    return document.DecodeRow(
        batch=batch,
        experts=roofline.experts_touched(model.experts, model.top_k, batch),
        bytes=int(time.work.bytes),
        bound=time.bound,
        seconds=seconds,
        each=1 / seconds if seconds else None,
        total=batch / seconds if seconds else None,
        best_total=batch / best if best else None,
    )


def _format(
    model: Architecture, device: Device, load: Workload, profiles: Mapping[str, ServerOptions], dense: DenseFormat
) -> document.FormatRow:
    freed, served = model.weight_bytes() - model.weight_bytes(dense), replace(load, dense=dense)
    return document.FormatRow(
        name=dense.name,
        attention=dense.attention,
        head=dense.head,
        bytes=int(roofline.decode(model, 1, replace(served, context=0)).bytes),
        freed_bytes=freed,
        kv_tokens=freed // max(1, model.full_layers * model.kv_layer_token(load.kv)),
        users=USERS,
        each=tuple(speed.ceiling(model, device, users, served) for users in USERS),
        forecasts=tuple(forecast.step(model, device, roofline.decode(model, users, served)) for users in USERS),
        profiles=tuple(name for name in choose.candidates(device, profiles) if profiles[name].dense == dense),
    )


def _speculation(
    model: Architecture, device: Device, load: Workload, profiles: Mapping[str, ServerOptions], draft: Draft
) -> document.Speculation:
    rows = []
    for dense in choose.dense_formats(device, profiles):
        for users in USERS:
            least = roofline.break_even(model, device, users, replace(load, dense=dense), draft)
            gains = tuple(tokens / least if least and tokens <= draft.tokens + 1 else None for tokens in ACCEPTED)
            name = f"{dense.attention}/{dense.head}"
            rows.append(document.SpeculationRow(dense=name, batch=users, break_even=least, gains=gains))
    return document.Speculation(draft=draft, accepted=ACCEPTED, rows=rows)


def _prefill(model: Architecture, device: Device, load: Workload, prompt: int) -> document.PrefillRow:
    works = list(roofline.prefill(model, prompt, 1, load))
    seconds = roofline.first_token_seconds(model, device, prompt, 1, load)
    bounds = {roofline.time(work, device).bound for work in works}
    return document.PrefillRow(
        prompt=prompt,
        chunk=load.batched,
        bound=" and ".join(sorted(bounds)),
        seconds=seconds,
        rate=prompt / seconds if seconds else None,
        forecast=forecast.prefill_seconds(model, device, prompt, load),
    )


def _advice(
    subject: Subject, device: Device, load: Workload, recommended: ProfileFit | None, nearest: ProfileFit | None
) -> str:
    """Return the next command, or the change to make, in one line."""
    model = subject.model
    if not budget.fits(model, device, load):
        name = shlex.quote(subject.recipe or subject.source)
        sequences, tokens = budget.most_sequences(model, device, load), budget.most_tokens(model, device, load)
        ways = [f"--concurrency {sequences}"] if sequences else []
        ways += [f"--context {tokens}"] if tokens else []
        ways += ["--kv-dtype fp8"] if load.kv != "fp8" and budget.fits(model, device, replace(load, kv="fp8")) else []
        if not ways:
            return "./inv plan gpt-oss-20b   # a smaller model"
        more = f"   # or {' or '.join(ways[1:])}" if ways[1:] else ""
        return f"./inv plan {name} --device {next(iter(device.names))} {ways[0]}{more}"
    if recommended:
        up = f"./inv up {subject.recipe}".rstrip() if subject.recipe not in families.defaults() else "./inv up"
        return up if "embedded" in device.profiles else f"{up} --device docker --profile {recommended.name}"
    if nearest is None:
        return f"less {PROFILES}   # it has no profile for this device; its flags are for a Spark and for processors"
    against = "; ".join(nearest.against)
    return f"less {PROFILES}   # ask for less, or change {nearest.name}, the nearest profile: {against}"
