"""The one table of checks, by name, in the order of the report."""

from __future__ import annotations

from collections.abc import Sequence

from validate import checks_hardware, checks_model, checks_numerics, checks_software, checks_speed
from validate.finding import Check, Table


def table(*groups: Sequence[Check]) -> Table:
    """Join groups of checks. Raises ValueError for a name that occurs twice."""
    every = [check for group in groups for check in group]
    named = {check.name: check for check in every}
    if len(named) != len(every):
        raise ValueError("two checks have one name")
    return named


CHECKS = table(
    checks_hardware.CHECKS, checks_software.CHECKS, checks_numerics.CHECKS, checks_model.CHECKS, checks_speed.CHECKS
)
