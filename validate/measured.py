"""Facts about the last speed that `./inv bench.perf` measured of a server on this machine's GPU, from its result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkforge import paths
from validate import checkpoint
from validate.facts import Reading
from validate.scene import Scene, once

FORMAT = "sparkforge-bench/1"
NEWEST = 50  # result files that are looked at, newest first
LARGEST = 20_000_000  # bytes of one; a result of 160 requests has 40 kB
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
PROCESSORS = {"embedded", "docker-cpu"}  # devices of serve/device.py that compute without a GPU
SHAPE = ("prompt", "answer", "concurrency", "ttft_ms", "tpot_ms")
SOURCE = "bench/**/*.json in the state, the newest that passed"


@once
def last(scene: Scene) -> dict[str, Any] | None:
    """Return the newest result that passed, of the model being validated, served from this machine on its GPU."""
    given = checkpoint.path(scene)
    found = newest(paths.state() / "bench", Path(given).name) if given else None
    return None if found is None else flat(*found)


def newest(folder: Path, model: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest fitting result under `folder` with its file; None if there is none. Never raises."""
    files = sorted(folder.glob("**/*.json"), key=_age, reverse=True)[:NEWEST] if folder.is_dir() else []
    fitting = [(file, value) for file in files for value in _results(file) if _fits(value, model)]
    return max(fitting, key=lambda pair: str(pair[1]["machine"].get("measured_at", "")), default=None)


def flat(file: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Return what the check needs of a result: its shape, and medians in milliseconds."""
    config, metrics = value["config"], value["metrics"]
    return {
        "file": file.name,
        "at": value["machine"].get("measured_at"),
        "prompt": config["isl"],
        "answer": config["osl"],
        "concurrency": config["conc"],
        "ttft_ms": metrics["ttft_ms"]["median"],
        "tpot_ms": (metrics.get("tpot_ms") or {}).get("median"),
    }


def _results(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's result if it is one that can be read: others' files lie there too, and half-written ones."""
    try:
        if file.stat().st_size <= LARGEST:
            value = json.loads(file.read_bytes())
            if isinstance(value, dict) and value.get("format") == FORMAT:
                yield value
    except (OSError, ValueError, RecursionError):
        return


def _fits(value: dict[str, Any], model: str) -> bool:
    try:
        config, server = value["config"], value["server"]
        return (
            value["passed"] is True
            and value["metrics"] is not None
            and str(config["model"]).rstrip("/").rsplit("/", 1)[-1] == model
            and config["tp"] == 1
            and urlsplit(str(config["url"])).hostname in LOOPBACK
            and server["device"] not in PROCESSORS
            and isinstance(value["machine"], dict)
            and all(_sound(flat(Path(), value)[name]) for name in SHAPE[:-1])
            and (flat(Path(), value)["tpot_ms"] is None or _sound(flat(Path(), value)["tpot_ms"]))
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _sound(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 10**9


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _reading(name: str) -> Reading:
    def read(scene: Scene) -> Any:
        """None if nothing was measured, which is an answer."""
        found = last(scene)
        return None if found is None else found[name]

    return Reading(f"measured.{name}", SOURCE, read)


READINGS = tuple(_reading(name) for name in ("file", "at", *SHAPE))
