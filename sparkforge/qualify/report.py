"""`./inv qualify`: runs every part, continues a killed run, and writes one report.

A part returns an outcome for each measurement, also for one that could not run.
"""

import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from sparkforge import __version__
from sparkforge.bench import context, runs
from sparkforge.bench.report import make_table, write_page
from sparkforge.core import gpus, paths
from sparkforge.core.console import echo, say
from sparkforge.core.errors import RefusalError, ServerError, SparkforgeError
from sparkforge.core.files import read_json, write_json
from sparkforge.core.memory import GIB
from sparkforge.core.process import ProbeError
from sparkforge.core.redact import for_support
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import SHARE
from sparkforge.image.devices import EMBEDDED, GPU
from sparkforge.plan import devices, speed, thresholds
from sparkforge.qualify import ledger
from sparkforge.qualify.ledger import Claim, Verdict
from sparkforge.serve import first_answers, launch, record
from sparkforge.serve.devices.in_environment import InEnvironment
from sparkforge.serve.record import Server
from validate.checks import serving
from validate.checks.finding import FactMissing, Status, View
from validate.facts.fact import load_sheet

HELD: Literal["held"] = "held"
DIFFERS: Literal["differs"] = "differs"
COULD_NOT_RUN: Verdict = "could not run"
PASSED: dict[Status, Verdict] = {Status.PASS: HELD, Status.SKIPPED: COULD_NOT_RUN}  # all others: DIFFERS
CONCURRENCIES = (1, 4, 16)
SHAPES = {GPU: (1024, 256), EMBEDDED: (64, 16)}  # tokens in and out of a request of the load; a CPU is slow
WORKING_GIB = 16.0  # for the tiny server's processes, and for the memory that the test takes
LEAST_SHARE = 0.1  # share of the GPU's memory with which the tiny server starts
OVERSHOOT_GIB = 4.0  # the test stops this far below the bound, so that a failed guard does not freeze the machine
GUARD_SECONDS = 120.0  # to allocate the memory; 16 GiB take seconds
END_SECONDS = 15.0  # for the server to end after SIGTERM
# Allocates CUDA memory in pieces, and prints the time when MemAvailable falls below the bound.
HOG = """
import sys, time
import torch
bound, floor, held, told = float(sys.argv[1]), float(sys.argv[2]), [], False
while True:
    lines = dict(line.split(":") for line in open("/proc/meminfo"))
    available = int(lines["MemAvailable"].split()[0]) / 2**20
    if available < bound and not told:
        print(time.time(), flush=True)
        told = True
    if available < floor or (told and available > bound + 2):  # the guard did not act, or the server has ended
        break
    held.append(torch.ones(1 << 28, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    time.sleep(0.05)
"""


class Outcome(Record):
    """The result of one measurement or check: verdict, evidence as a sentence, a figure (None: none), and model."""

    verdict: Verdict
    evidence: str
    figure: float | None = None
    model: str = ""


@dataclass(frozen=True)
class Qualification:
    """The parts' inputs: the devices of the tiny and the user's model (None: none), and a load's tokens in and out."""

    tiny: InEnvironment
    model: InEnvironment | None
    folder: Path
    shape: tuple[int, int]


Outcomes = dict[str, Outcome]


def machine(qualification: Qualification) -> Outcomes:
    """Run the validator for the tiny model: every check is an outcome, and some facts are figures."""
    report = paths.state() / "validation.json"
    report.unlink(missing_ok=True)
    with suppress(RefusalError):  # the report says which checks failed
        qualification.tiny.validate()
    findings, facts = read_json(report)["findings"], load_sheet(report)
    outcomes = {
        row["check"]: Outcome(verdict=PASSED.get(Status(row["status"]), DIFFERS), evidence=row["evidence"])
        for row in findings
    }

    def add(name: str, unit: str, value: float | None) -> None:
        if value is not None:
            outcomes[name] = Outcome(verdict=HELD, evidence=f"{value:,.6g} {unit}".strip(), figure=value)

    add("memory-gib", "GiB", psutil.virtual_memory().total / GIB)
    add("cores", "", float(os.cpu_count() or 0))
    for name, fact, key in (
        ("sm-clock-highest-mhz", "gpu.state", "clocks.max.sm"),
        ("sm-clock-loaded-mhz", "numerics.loaded", "clocks.sm"),
        ("power-loaded-watts", "numerics.loaded", "power.draw"),
    ):
        state = facts[fact].value if fact in facts else None
        if isinstance(state, Mapping):
            add(name, "W" if key == "power.draw" else "MHz", gpus.number(str(state.get(key, ""))))
    return outcomes


def kernels(qualification: Qualification) -> Outcomes:
    """Report that FlashInfer's modules are compiled and audited, which `prepare` has done."""
    capability = getattr(qualification.tiny, "capability", None)
    if capability is None or not capability.flashinfer:
        why = "the experts of this device are not FlashInfer's, so none of its modules is compiled"
        return {"kernels": Outcome(verdict=COULD_NOT_RUN, evidence=why)}
    # `prepare` raises an error for a failed compilation or audit, so both succeeded.
    seconds = qualification.tiny.steps.seconds.get("kernels", 0.0)
    evidence = f"compiled, or unchanged, and audited for {capability.architecture} in {seconds:.0f} s"
    return {"kernels": Outcome(verdict=HELD, evidence=evidence, figure=seconds)}


@contextmanager
def _serving(device: InEnvironment, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start the server of `device` with additional environment variables, and stop it at the end."""
    with launch.starting():
        started = device.launch()
        started = replace(started, environment={**started.environment, **(environment or {})})
        server = launch.start(started, lambda _line: None)
        try:
            yield server
        finally:
            with suppress(ServerError):  # it may have ended
                launch.stop()


def tiny(qualification: Qualification) -> Outcomes:
    """Serve the tiny model and compare its first answers with the recorded ones. Raises ServerError if they differ."""
    with _serving(qualification.tiny) as server:
        difference = first_answers.compare(server.endpoint)
    evidence = (
        f"the recorded tokens, log probabilities {difference:.3f} from float32; {len(server.proof)} kinds of request "
        f"answered in {server.proof_seconds:.1f} s"
    )
    return {"first-answers": Outcome(verdict=HELD, evidence=evidence, figure=difference)}


def guard(qualification: Qualification) -> Outcomes:
    """Allocate CUDA memory until the memory guard ends the tiny server; the guard's bound is higher than usual."""
    device, machine_memory = qualification.tiny, psutil.virtual_memory()
    why = "there is no CUDA memory here; lab/memory_guard.py tests the guard with a server's own memory"
    if device.name == GPU:
        why = "the GPU has its own memory, so CUDA allocations take none of the memory that the guard watches"
        with suppress(ProbeError):  # nvidia-smi has no figure for a GB10's memory
            if gpus.number(gpus.query("memory.total", units=False, env=os.environ)[0]["memory.total"]) is None:
                why = ""
    bound = thresholds.load().end_share * machine_memory.total / GIB  # a higher bound has no effect
    share = (machine_memory.available / GIB - bound - WORKING_GIB) * GIB / machine_memory.total
    if not why and share < LEAST_SHARE:
        why = f"{machine_memory.available / GIB:.0f} GiB are free, too little for a server and this test"
    if why:
        return {"memory-guard": Outcome(verdict=COULD_NOT_RUN, evidence=why)}
    flags = (*device.plan.flags, SHARE, f"{share:.2f}")
    smaller = type(device)(replace(device.plan, flags=flags))
    with _serving(smaller, {thresholds.VARIABLE: f"{bound:.2f}"}) as server:
        command = [str(device.python), "-c", HOG, f"{bound:.2f}", f"{bound - OVERSHOOT_GIB:.2f}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hog:
            try:
                with suppress(subprocess.TimeoutExpired):
                    hog.wait(GUARD_SECONDS)
                deadline = time.monotonic() + END_SECONDS
                while server.alive and time.monotonic() < deadline:
                    time.sleep(0.05)
                end = record.ended(server)
            finally:
                hog.kill()
            low = (hog.stdout.read() if hog.stdout else "").split()
    if end is None or not end.why:
        why = f"MemAvailable fell below {bound:.1f} GiB and no guard acted" if low else "MemAvailable did not fall"
        return {"memory-guard": Outcome(verdict=DIFFERS, evidence=why)}
    seconds = max(0.0, end.time - float(low[0])) if low else None
    return {"memory-guard": Outcome(verdict=HELD, evidence=end.why, figure=seconds)}


def model(qualification: Qualification) -> Outcomes:
    """Start the user's model, run gate and load, and compare the speed with the plan's ceiling."""
    names = ("model-start", "gate", *(f"speed-{count}" for count in CONCURRENCIES), "power")
    device = qualification.model
    if device is None:
        why = "no model was named: ./inv qualify --model FOLDER"
        return {name: Outcome(verdict=COULD_NOT_RUN, evidence=why) for name in names}
    outcomes: Outcomes = {}
    device.validate()
    view = View(load_sheet(paths.state() / "validation.json"))
    started = time.monotonic()
    with _serving(device) as server:
        seconds, served = time.monotonic() - started, device.model_id
        outcomes["model-start"] = Outcome(
            verdict=HELD, evidence=f"proved after {seconds:.0f} s", figure=seconds, model=served
        )
        tokens_in, tokens_out = qualification.shape
        flags = {
            "url": server.url,
            "model": served,
            "isl": str(tokens_in),
            "osl": str(tokens_out),
            "conc": ",".join(map(str, CONCURRENCIES)),
            "output": str(qualification.folder / "bench"),
        }
        with sample_power() as watts:
            try:
                results = runs.measure(flags).results
            except SparkforgeError as error:
                outcomes["gate"] = Outcome(verdict=DIFFERS, evidence=f"{error.what}: {error.why}", model=served)
                return outcomes
    first = results[0].gate
    outcomes["gate"] = Outcome(verdict=HELD, evidence=f"{first.text} by {first.source}", model=served)
    for result in results:
        if result.speed:
            outcomes[f"speed-{result.config.conc}"] = against_plan(view, result.speed)
    if watts:
        mean = sum(watts) / len(watts)
        evidence = f"{mean:.0f} W on average under these loads, {max(watts):.0f} at most"
        outcomes["power"] = Outcome(verdict=HELD, evidence=evidence, figure=mean)
    return {name: outcome.model_copy(update={"model": served}) for name, outcome in outcomes.items()}


def against_plan(view: View, measured: speed.Measured) -> Outcome:
    """Return the outcome of comparing a measured speed with the plan's bounds for this GPU."""
    told = f"{1000 / measured.tpot_ms:.1f} tok/s each" if measured.tpot_ms else "no token but the first"
    try:
        device = None if view.is_none("gpu.name") else devices.by_gpu(view.text("gpu.name"))
        if device is None or device.bytes_a_second is None:
            return Outcome(verdict=COULD_NOT_RUN, evidence=f"{told}; no memory bandwidth is known for this device")
        architecture = serving.architecture(view)
        comparisons = list(speed.compare(architecture, device, measured, serving.load(view, architecture)))
    except FactMissing as error:
        return Outcome(verdict=COULD_NOT_RUN, evidence=f"{told}; {error}")
    verdict = DIFFERS if any(comparison.causes for comparison in comparisons) else HELD
    evidence = "; ".join(comparison.told for comparison in comparisons)
    return Outcome(verdict=verdict, evidence=evidence or told, figure=comparisons[0].measured if comparisons else None)


@contextmanager
def sample_power(period: float = 1.0) -> Iterator[list[float]]:
    """Yield a list that grows by the GPU's power in watts every `period` seconds; it stays empty without a figure."""
    ended, watts = threading.Event(), list[float]()

    def sample() -> None:
        """Query nvidia-smi until the load has ended or nvidia-smi gives no figure."""
        while not ended.wait(period):
            try:
                power = gpus.number(gpus.query("power.draw", units=False, env=os.environ)[0]["power.draw"])
            except ProbeError:
                return
            if power is None:
                return
            watts.append(power)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield watts
    finally:
        ended.set()
        thread.join()


PARTS: dict[str, Callable[[Qualification], Outcomes]] = {
    "machine": machine,
    "kernels": kernels,
    "tiny": tiny,
    "guard": guard,
    "model": model,
}


def run_part(name: str, qualification: Qualification) -> Outcomes:
    """Run a part. A SparkforgeError becomes an outcome of the part, so that the next parts still run."""
    try:
        return PARTS[name](qualification)
    except SparkforgeError as error:
        say(f"✗ {name}: {error.what}: {error.why}")
        names = {"tiny": "first-answers", "guard": "memory-guard", "model": "model-start"}
        return {names.get(name, name): Outcome(verdict=DIFFERS, evidence=f"{error.what}: {error.why}")}


CAPABILITY = "12.1"  # of a GB10; a report of another GPU does not settle a claim


class RowResult(Record):
    """A run's verdict on one claim of the ledger."""

    id: str
    verdict: Verdict
    evidence: str


class PartResult(Record):
    """The result of a part, and its duration."""

    outcomes: dict[str, Outcome]
    seconds: float


class Progress(Record):
    """The finished parts of a run with certain inputs, by name."""

    inputs: str
    parts: dict[str, PartResult]


class Report(Record):
    """A whole report, without a name, an address or a path of the machine. `seconds` are those of each part."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    version: str
    commit: str
    measured_at: str
    stack: str
    device: str
    gpu: dict[str, str]
    machine: dict[str, str | int]
    outcomes: dict[str, Outcome]
    rows: tuple[RowResult, ...]
    seconds: dict[str, float]


def judge(claim: Claim, outcomes: Mapping[str, Outcome], capability: str) -> RowResult:
    """Judge a claim by the outcomes; figures are compared only on a GPU of a Spark's capability."""
    outcome = outcomes.get(claim.settled_by)
    if outcome is None:
        return RowResult(id=claim.id, verdict=COULD_NOT_RUN, evidence=f"this device does not run {claim.settled_by}")
    verdict, evidence = outcome.verdict, outcome.evidence
    if claim.model and outcome.model and claim.model != outcome.model:
        verdict, evidence = COULD_NOT_RUN, f"measured with {outcome.model}: {evidence}"
    elif claim.between and capability != CAPABILITY:
        verdict, evidence = COULD_NOT_RUN, f"this machine is no Spark: {evidence}"
    elif claim.between and verdict == HELD:
        low, high = claim.between
        is_inside = outcome.figure is not None and low <= outcome.figure <= high
        verdict = HELD if is_inside else DIFFERS
    return RowResult(id=claim.id, verdict=verdict, evidence=evidence)


def qualify(qualification: Qualification, *, again: bool = False) -> Report:
    """Run every part that an earlier run with the same inputs has not finished; write report.json and report.html.

    Parts that could not run are run again. Raises the errors of preparing the device.
    """
    qualification.tiny.prepare()
    folder, facts = qualification.folder, context.facts()
    progress = folder / "progress.json"
    named = qualification.model.model if qualification.model else ""
    made_of = [facts["gpus"], facts["commit"], qualification.tiny.plan, qualification.tiny.python, named]
    inputs = hashlib.sha256(repr(made_of).encode()).hexdigest()
    finished: dict[str, PartResult] = {}
    with suppress(OSError, ValueError):  # the file is missing or damaged
        earlier = Progress.model_validate(read_json(progress))
        finished = dict(earlier.parts) if earlier.inputs == inputs and not again else {}
    for name in PARTS:
        if name in finished:
            say(f"{name}: finished in an earlier run (--again runs it once more)")
            continue
        steps = qualification.tiny.steps
        steps.total = max(steps.total, len(steps.seconds) + 1)
        with steps.step(f"qualify {name}") as tell:
            outcomes = run_part(name, qualification)
            tell(f"{sum(outcome.verdict == HELD for outcome in outcomes.values())} of {len(outcomes)} held")
        finished[name] = PartResult(outcomes=outcomes, seconds=steps.seconds[f"qualify {name}"])
        kept = {
            key: part
            for key, part in finished.items()
            if any(outcome.verdict != COULD_NOT_RUN for outcome in part.outcomes.values())
        }
        write_json(progress, Progress(inputs=inputs, parts=kept).model_dump())
    all_outcomes = {name: outcome for part in finished.values() for name, outcome in part.outcomes.items()}
    claims = [claim for claim in ledger.load().claims if claim.settled_by]
    machine = {name: facts[name] for name in ("processor", "cores", "memory_bytes", "system", "python")}
    gpu: dict[str, str] = {}
    with suppress(ProbeError):
        if qualification.tiny.name == GPU:
            gpu = gpus.query("name", "compute_cap", "driver_version", env=os.environ)[0]
    whole = Report(
        version=__version__,
        commit=facts["commit"],
        measured_at=facts["measured_at"],
        stack=qualification.tiny.environment.name,
        device=qualification.tiny.name,
        gpu=gpu,
        machine=machine,
        outcomes=all_outcomes,
        rows=tuple(judge(claim, all_outcomes, gpu.get("compute_cap", "")) for claim in claims),
        seconds={name: part.seconds for name, part in finished.items()},
    )
    report = Report.model_validate(for_support(whole.model_dump(mode="json", by_alias=True)))
    write_json(folder / "report.json", report.model_dump(mode="json", by_alias=True))
    shown = ", ".join(report.gpu.values()) or "no GPU"
    results = [(name, o.verdict, o.evidence, o.model) for name, o in report.outcomes.items()]
    texts = {claim.id: claim.claim for claim in claims}
    rows = [(row.id, row.verdict, texts[row.id], row.evidence) for row in report.rows]
    write_page(
        folder / "report.html",
        (
            "Sparkforge qualification",
            f"{shown} · device {report.device} · stack {report.stack} · {report.measured_at} · {report.commit}",
            make_table("claims of the hardware ledger", ("id", "verdict", "claim", "evidence"), rows),
            make_table("outcomes", ("name", "verdict", "evidence", "model"), results),
            make_table("seconds of each part", ("part", "seconds"), report.seconds.items()),
        ),
    )
    return report


def print_report(report: Report) -> None:
    """Print the rows, and the number of each verdict."""
    width = max(len(row.id) for row in report.rows)
    for row in report.rows:
        echo(f"{row.verdict:<13} {row.id:<{width}}  {row.evidence}")
    verdicts = [row.verdict for row in report.rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (HELD, DIFFERS, COULD_NOT_RUN))
    say(f"of {len(report.rows)} claims that `./inv qualify` tests: {counts}")
