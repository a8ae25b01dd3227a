"""Every scenario, by name."""

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

SCENARIOS = {scenario.name: scenario for module in MODULES for scenario in module.SCENARIOS}
