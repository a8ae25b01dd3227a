"""The serve profile and kernels of each compute capability (capabilities.toml), and the check of this machine's GPU.

This module does not import torch, so that a GPU that cannot serve is refused before 8 GB of packages are installed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from sparkforge.core import gpus, tables
from sparkforge.core.errors import RefusalError
from sparkforge.core.process import ProbeError
from sparkforge.core.tables import Record

TABLE = Path(__file__).with_name("capabilities.toml")
MIN_DRIVER = 580  # the first branch with CUDA 13.0 (CUDA 13.0 release notes)
IN_USE = 0.1  # of a GPU's memory; a desktop takes less
FIELDS = ("name", "compute_cap", "driver_version", "memory.total", "memory.used", "mig.mode.current")
WITHOUT_GPU = "./inv up --device embedded   # serves the tiny model without a GPU"


class Capability(Record):
    """One row of the table, whose head explains the keys."""

    gpus: str
    profile: str
    validator: Literal["gpu", "spark"]
    architecture: str
    experts: str
    dense: str
    attention: str
    flashinfer: bool
    shown: str = Field(min_length=1)


class CapabilityTable(Record):
    """The whole table, by compute capability."""

    schema_: Literal[1] = Field(alias="schema")
    capabilities: dict[str, Capability]


def load(table: Path = TABLE) -> dict[str, Capability]:
    """Return the rows by compute capability. Raises InputError."""
    return tables.load(table, CapabilityTable).capabilities


def find(environ: Mapping[str, str], share: float = 1 - IN_USE) -> tuple[str, Capability]:
    """Return the name of the GPU that serves, and its row. `share` is the part of its memory that must be free.

    The GPU is the first one in CUDA_VISIBLE_DEVICES of `environ`, by default the machine's first. Raises RefusalError
    if it cannot serve, InputError for a malformed table.
    """
    if gpus.hidden(environ):
        why = f"{gpus.VISIBLE} is {environ[gpus.VISIBLE]!r}, which hides every GPU"
        raise _refusal(why, f"unset {gpus.VISIBLE}")
    chosen = environ.get(gpus.VISIBLE, "").split(",")[0].strip()
    try:
        row = gpus.query(*FIELDS, units=False, env={**environ, gpus.VISIBLE: chosen or "0"})[0]
    except ProbeError as error:
        if chosen:
            why = f"nvidia-smi finds no GPU for {gpus.VISIBLE}={chosen}: {error}"
            raise _refusal(why, f"nvidia-smi -L   # lists them; then set {gpus.VISIBLE}, or unset it") from error
        raise _refusal(f"no NVIDIA driver works here: {error}", f"nvidia-smi   # or {WITHOUT_GPU}") from error
    name, capability, driver = row["name"], row["compute_cap"], row["driver_version"]
    if not driver.split(".")[0].isdecimal() or int(driver.split(".")[0]) < MIN_DRIVER:
        why = f"{name} has driver {driver}, and CUDA 13.0 needs branch {MIN_DRIVER} or later"
        raise _refusal(why, "install a newer driver, such as: sudo apt install nvidia-open; then reboot")
    known = load()
    if capability not in known:
        served = ", ".join(f"{number} ({line.gpus})" for number, line in known.items())
        raise _refusal(f"{name} has compute capability {capability}; there are kernels for {served}", WITHOUT_GPU)
    if row["mig.mode.current"] == "Enabled":
        raise _refusal(f"{name} is divided by MIG, which was not tested", "sudo nvidia-smi -mig 0")
    total, used = (gpus.number(row[field]) for field in ("memory.total", "memory.used"))
    if total and used and used > (1 - share) * total:  # [N/A] on a GB10, whose memory is the system's
        why = f"{used:,.0f} of {total:,.0f} MiB of {name} are in use, and {share:.0%} must be free"
        raise _refusal(why, "nvidia-smi shows the process; end it, or choose another GPU with CUDA_VISIBLE_DEVICES")
    return name, known[capability]


def _refusal(why: str, fix: str) -> RefusalError:
    return RefusalError("--device gpu cannot serve on this machine", why, fix)
