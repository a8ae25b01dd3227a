"""Checks: pure functions from facts to findings. `CHECKS` has all of them by name, in the order of the report."""

from validate.checks import arguments, hardware, model, software
from validate.checks.finding import Table, join

CHECKS: Table = join(hardware.CHECKS, arguments.CHECKS, software.CHECKS, model.CHECKS)
