"""Startup gate: facts → checks → report → exit code.

`run(profile, Options(...))` validates this machine and returns a Report; `Report.require_green()` raises unless the
server may start. `python -m validate` is the same as a command.
"""

from validate.gate import Report, Verdict, rehearse, run
from validate.scene import Options

__all__ = ["Options", "Report", "Verdict", "rehearse", "run"]
