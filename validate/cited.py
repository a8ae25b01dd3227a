"""Other people's figures of `bench/baselines.toml` beside the computed bound of the same shape and formats."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from sparkforge import paths
from sparkforge.errors import PlanTableError
from validate import roofline, speed
from validate.architecture import Architecture
from validate.devices import Device
from validate.tables import Record

FILE = paths.ROOT / "bench" / "baselines.toml"
ANY_PROMPT = 1024  # tokens, where a source does not say how many


class Against(Record):
    """A cited figure and the bound that it could reach. All in tokens a second; `share` is cited over computed."""

    whose: str
    shape: str
    quantity: str
    cited: float
    computed: float
    share: float
    dense: str
    kv: str
    source: str
    date: str


def against(model: Architecture, device: Device, prefix: str, file: Path = FILE) -> list[Against]:
    """Compare every figure whose name begins with `prefix`. An image without the file has none.

    Raises PlanTableError for a file that is malformed.
    """
    if not file.is_file():
        return []
    try:
        rows = tomllib.loads(file.read_text(encoding="utf-8"))["figures"]
        return [found for row in rows if row["name"].startswith(prefix) for found in _row(model, device, row)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PlanTableError(f"{file.name} is malformed", why, f"git diff {file}") from error


def _row(model: Architecture, device: Device, row: dict[str, Any]) -> list[Against]:
    prompt, answer, concurrency = row["shape"]
    formats = next((f for f in speed.judging().formats if f.name == row["name"]), None)
    if formats is None:
        return []
    prompt, concurrency = prompt or ANY_PROMPT, concurrency or 1
    each = speed.ceiling(model, device, concurrency, prompt + answer // 2, formats.kv, formats.dense)
    first = roofline.first_token_seconds(model, device, prompt, 1, formats.chunk, formats.kv)
    bounds = {
        "interactivity": each,
        "output_throughput": each * concurrency if each else None,
        "prefill": prompt / first if first else None,
    }
    told = "/".join(str(n) if n else "?" for n in row["shape"][:2]) + f" c{concurrency}"
    return [
        Against(
            whose=row["name"],
            shape=told,
            quantity=quantity,
            cited=value,
            computed=bound,
            share=value / bound,
            dense=formats.dense,
            kv=formats.kv,
            source=row["source"],
            date=row["date"],
        )
        for quantity, value in row["values"].items()
        if (bound := bounds.get(quantity))
    ]
