"""Every scenario, by name."""

from __future__ import annotations

from robustness.scenario import Scenario
from robustness.scenarios import (
    archives,
    benchmarks,
    bundles,
    checkpoints,
    environments,
    fetching,
    kernel_cache,
    patching,
    records,
    sources,
    tiny_model,
)

MODULES = (archives, benchmarks, bundles, checkpoints, environments, fetching, kernel_cache, patching, records, sources,
           tiny_model)  # fmt: skip

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for module in MODULES for scenario in module.SCENARIOS}
