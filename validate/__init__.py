"""The startup validator: facts → checks → report → exit code.

`run(profile, Options(...))` validates this machine and returns a ValidationReport; its `error()` is the reason why the
server must not start. The command is `python -m validate`.
"""

from validate.facts.target import Options
from validate.gate import ValidationReport, ValidationVerdict, rehearse, run

__all__ = ["Options", "ValidationReport", "ValidationVerdict", "rehearse", "run"]
