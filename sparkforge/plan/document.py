"""A plan as a document, sparkforge-plan/1: the output of `./inv plan --json`, and the content of its tables.

`lab.reference_pages` makes `plan.schema.json` from this module.
"""

from typing import Literal

from sparkforge.core.tables import Record
from sparkforge.plan.architecture import Draft
from sparkforge.plan.budget import Line
from sparkforge.plan.choose import ProfileFit
from sparkforge.plan.cluster import ClusterPlan
from sparkforge.plan.devices import Device
from sparkforge.plan.forecast import Forecast
from sparkforge.plan.speed import Against, Comparison


class Asked(Record):
    """The requested workload. `kv` is bf16 (also for `auto`) or fp8."""

    context: int
    concurrency: int
    kv: str


class ModelRow(Record):
    """The model. In bytes, `computed` is the sum of its parts, `on_disk` the checkpoint's size (None: not known)."""

    name: str
    source: str
    computed: int
    on_disk: int | None


class DeviceRow(Record):
    """The device with its figures and their sources."""

    name: str
    described: Device


class WeightRow(Record):
    """Weights of one kind over all layers."""

    name: str
    form: str
    bytes: int


class Capacity(Record):
    """What fits. `missing_bytes` is above 0 if the request does not fit; shares are of the device's memory."""

    fits: bool
    missing_bytes: int
    needed_share: float
    most_share: float
    most_sequences: int
    most_tokens: int


class DecodeRow(Record):
    """Upper bounds of a decode step. `each` and `total` are tokens per second, of one user and of all; None: not known.

    `best_total` is the total if all tokens choose the same experts.
    """

    batch: int
    experts: float
    bytes: int
    bound: str
    seconds: float | None
    each: float | None
    total: float | None
    best_total: float | None


class FormatRow(Record):
    """Dense layers in one format. One user's token reads `bytes`; bf16 would take `freed_bytes` more memory.

    For each number of `users`, `each` is the upper bound of tokens per second of one user (None: not known), and
    `forecasts` has the times of a step's parts with our kernels. `kv_tokens` is the number of tokens that the freed
    bytes add to the KV cache. `profiles` are those that serve the dense layers in this format.
    """

    name: str
    attention: str
    head: str
    bytes: int
    freed_bytes: int
    kv_tokens: int
    users: tuple[int, ...]
    each: tuple[float | None, ...]
    forecasts: tuple[Forecast | None, ...]
    profiles: tuple[str, ...]


class CacheRow(Record):
    """A KV cache of one type: how many sequences of the context fit, and how many tokens in all."""

    kv: str
    token_bytes: int
    sequences: int
    tokens: int


class PrefillRow(Record):
    """Bounds of the prefill speed of a single prompt. `seconds` is the least time to the first token; None: not known.

    `forecast` is the expected time to the first token with our kernels.
    """

    prompt: int
    chunk: int
    bound: str
    seconds: float | None
    rate: float | None
    forecast: float | None


class SpeculationRow(Record):
    """A draft with `batch` sequences at once. A step must gain more than `break_even` tokens for a speedup.

    `gains` are the speedups over decoding without the draft, one for each of `accepted`; None: not known, or more
    tokens than the draft proposes.
    """

    dense: str
    batch: int
    break_even: float | None
    gains: tuple[float | None, ...]


class Speculation(Record):
    """Upper bounds of speculative decoding with even routing; real tokens of one sequence share more experts."""

    draft: Draft
    accepted: tuple[float, ...]
    rows: list[SpeculationRow]


class Plan(Record):
    """The whole plan."""

    format: Literal["sparkforge-plan/1"] = "sparkforge-plan/1"
    established: Literal["computed"] = "computed"
    asked: Asked
    model: ModelRow
    device: DeviceRow
    weights: list[WeightRow]
    memory_bytes: int
    budget: tuple[Line, ...]
    left_bytes: int
    fit: Capacity
    decode: list[DecodeRow]
    prefill: list[PrefillRow]
    few_tokens: int | None
    formats: list[FormatRow]
    caches: list[CacheRow]
    profiles: list[ProfileFit]
    recommended: str
    advice: str
    cited: list[Against]
    measured: list[Comparison]
    cluster: ClusterPlan | None = None
    speculation: Speculation | None = None
