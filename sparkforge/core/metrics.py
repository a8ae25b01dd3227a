"""Reads vLLM's /metrics: the values of a few names, from a text that a server may have filled with anything."""

from __future__ import annotations

import math
from collections.abc import Collection

from prometheus_client.parser import text_string_to_metric_families

LONGEST = 4096  # characters of a line that is parsed; vLLM's have 100
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, LookupError)


def values(text: str, names: Collection[str]) -> dict[str, list[float]]:
    """Return the finite values of each of `names` that is there, one for each set of labels.

    Raises one of MALFORMED for lines that are no metrics.
    """
    lines = [line for line in text.splitlines() if line.startswith(tuple(names)) and len(line) < LONGEST]
    values_by_name: dict[str, list[float]] = {}
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            if sample.name in names and math.isfinite(sample.value):
                values_by_name.setdefault(sample.name, []).append(sample.value)
    return values_by_name
