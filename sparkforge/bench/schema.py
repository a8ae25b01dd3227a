"""The content of a result file. `lab.reference_pages` makes `result.schema.json` from this module."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PlainSerializer

from sparkforge.core import paths, tables
from sparkforge.core.console import without_passwords
from sparkforge.core.errors import InputError
from sparkforge.core.files import DocumentError, read_json, write_json
from sparkforge.core.openai import last_part
from sparkforge.core.tables import Record
from sparkforge.plan.speed import Measured

LARGEST = 20_000_000  # bytes of a result file; one of 160 requests has 40 kB
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
PROCESSORS = {"embedded", "docker-cpu"}  # devices that compute without a GPU


class Config(Record):
    """One configuration of server and load. Lengths are in tokens."""

    model: str
    url: Annotated[str, PlainSerializer(without_passwords, return_type=str)]
    tp: int = Field(ge=1, description="GPUs that share the model; figures 'per GPU' are divided by it")
    isl: int = Field(ge=1, description="tokens in each prompt")
    osl: int = Field(ge=1, description="tokens in each answer")
    conc: int = Field(ge=1, description="requests under way at once")
    max_model_len: int = Field(ge=2)
    random_range_ratio: float = Field(ge=0, lt=1, description="lengths vary by this share around isl and osl")
    num_prompts: int = Field(ge=1)
    warmups: int = Field(ge=0)
    seed: int = 0

    @property
    def name(self) -> str:
        """File name stem of its result."""
        return f"result_isl{self.isl}_osl{self.osl}_conc{self.conc}"

    @property
    def key(self) -> tuple[int, int, int]:
        """Lengths and concurrency, the key of cited figures."""
        return self.isl, self.osl, self.conc

    @property
    def shape(self) -> str:
        """Lengths and concurrency in a few characters."""
        return f"{self.isl}/{self.osl} c{self.conc}"


class ResultCheck(Record):
    """One check and its result; a check of a figure has `value` and `limit`."""

    name: str
    ok: bool
    told: str
    value: float | None = None
    limit: float | None = None
    bound: Literal["upper", "lower"] | None = Field(
        default=None, description="whether `limit` is an upper or a lower limit of `value`; null without them"
    )

    @property
    def label(self) -> str:
        """The check's name and the kind of its limit, because a figure may have an upper and a lower limit."""
        return f"{self.name}, {self.bound} limit" if self.bound else self.name


class Gate(Record):
    """The accuracy gate's verdict on a served model."""

    passed: bool
    checks: list[ResultCheck]
    text: str = Field(description="name of the text that was scored")
    text_sha256: str = Field(default="", description="sha256 of the file that holds the text")
    chunked_by: Literal["tokens", "bytes"]  # bytes: of older results only
    bits_per_byte: float | None
    byte_perplexity: float | None
    word_perplexity: float | None
    tokens: int
    seconds: float
    sanity_only: bool = Field(description="this model has no threshold: it only had to predict better than xz")
    limits: str = Field(default="", description="which limits were used, in words; empty in older results")
    source: str = Field(description="where the thresholds come from")


class Request(Record):
    """One finished request. Times are in milliseconds; `start_ms` is relative to the load's start."""

    start_ms: float
    ttft_ms: float
    tpot_ms: float | None
    e2el_ms: float
    prompt_tokens: int
    output_tokens: int


class Spread(Record):
    """A latency over all requests, in milliseconds."""

    mean: float
    median: float
    p99: float


class Metrics(Record):
    """A load's figures. Throughput in tokens per second; latencies by vLLM's definitions."""

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    output_throughput: float
    total_token_throughput: float
    tput_per_gpu: float = Field(description="total_token_throughput / tp: counts the prompts' tokens too")
    output_tput_per_gpu: float
    interactivity: float | None = Field(description="1000 / median tpot: tokens a second that one user sees")
    ttft_ms: Spread
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2el_ms: Spread


class Ratio(Record):
    """Our figure divided by a cited one of the same shape."""

    figure: str
    quantity: str
    measured: float
    cited: float
    ratio: float
    better: bool
    source: str
    date: str


class CompetitionBaseline(Record):
    """The gpt-oss competition's B200 figures of the same shape, with its own names: milliseconds, tokens per second."""

    b200_median_e2e_1126: float
    b200_tput_pergpu_1126: float


class Client(Record):
    """The client that made the load."""

    name: str
    version: str


class ServedModel(Record):
    """Facts about the server: reported by the endpoint, and known to this checkout."""

    model: str
    version: str = ""
    device: str = ""
    startup_seconds: dict[str, float] = Field(default={})
    memory_bytes: dict[str, int] = Field(default={})
    findings: list[dict[str, Any]] = Field(default=[])
    records: dict[str, Any] = Field(default={})


class Result(Record):
    """The result of one configuration; it may have failed."""

    format: Literal["sparkforge-bench/1"] = "sparkforge-bench/1"
    passed: bool
    config: Config
    gate: Gate
    checks: list[ResultCheck]
    metrics: Metrics | None
    ratios: list[Ratio] = Field(default=[])
    b200_baseline_nv1126: CompetitionBaseline | None = Field(
        default=None, description="null where the competition has no B200 figure of this shape, or the load failed"
    )
    tput_per_gpu_ratio_vs_b200_1126: float | None = Field(
        default=None, description="above 1 is more throughput than the B200"
    )
    median_e2e_ratio_vs_b200_1126: float | None = Field(
        default=None, description="below 1 is less latency than the B200"
    )
    requests: list[Request] = Field(default=[])
    client: Client
    server: ServedModel
    machine: dict[str, Any] = Field(default={})
    seconds: float

    @property
    def reasons(self) -> list[str]:
        """The reasons for the result's failure; empty if it passed."""
        return [check.told for check in (*self.gate.checks, *self.checks) if not check.ok]

    @property
    def speed(self) -> Measured | None:
        """The result's figures for the comparison with a plan; None if it has no figures."""
        c, m = self.config, self.metrics
        if m is None:
            return None
        return Measured(c.isl, c.osl, c.conc, m.ttft_ms.median, m.tpot_ms.median if m.tpot_ms else None)

    @property
    def digest(self) -> str:
        """SHA-256 of the content, equal on every machine."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def write(path: Path, result: Result) -> None:
    """Write a result atomically."""
    write_json(path, result.model_dump(mode="json"))


def read(path: Path) -> Result:
    """Return the result in a file. Raises InputError."""
    try:
        return Result.model_validate(read_json(path, largest=LARGEST))
    except OSError as error:
        why, fix = error.strerror or str(error), "--help   # name a result_*.json file"
        raise InputError(f"cannot read {path}", why, fix, code="input.result") from error
    except ValueError as error:  # no JSON, or no result
        why = error.why if isinstance(error, DocumentError) else tables.first_fault(error)
        raise InputError(f"{path.name} is no result", why, "./inv bench.perf makes one", code="input.result") from error


def newest_speed(model: str) -> Measured | None:
    """Return the speed of `model` in the newest passed result of this machine's GPU; None if there is none.

    Files that are not readable results are skipped, because the folder may contain other and incomplete files.
    """
    newest, date = None, ""
    for file in (paths.state() / "bench").glob("**/*.json"):
        try:
            result = read(file)
        except InputError:
            continue
        config, measured_at = result.config, str(result.machine.get("measured_at", ""))
        is_local = urlsplit(config.url).hostname in LOOPBACK and result.server.device not in PROCESSORS
        counts = result.passed and config.tp == 1 and last_part(config.model) == last_part(model)
        if result.speed and counts and is_local and measured_at >= date:
            newest, date = replace(result.speed, where=file.name), measured_at
    return newest


def finite(value: float) -> float | None:
    """Return `value`, or None if it is not finite, because JSON has no such number."""
    return value if math.isfinite(value) else None
