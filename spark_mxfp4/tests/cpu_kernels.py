"""CUDA kernels compiled for this machine's CPU, with stand-ins for a GPU's instructions and runtime."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from spark_mxfp4.kernels import precompile

BF16 = 0.006  # the largest error allowed for a layer with bf16 activations between the products
STAND_INS = Path(__file__).parent / "on_cpu"


def shared_library(folder: Path, unit: str, *, change: Callable[[str], str] = str) -> str:
    """Compile `unit` with the kernels' sources, each changed by `change`, and the stand-ins; return the library.

    A stand-in replaces the source of the same name. Tests that call this need `c++` (pytest.mark.needs).
    """
    for path in precompile.FOLDER.glob("*.cu*"):
        (folder / path.name).write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in STAND_INS.iterdir():
        shutil.copy(path, folder)
    library = folder / f"{Path(unit).stem}.so"
    # Each library has its own copy of the stand-ins' variables, though a process loads several libraries.
    command = ["c++", "-x", "c++", "-std=c++17", "-O1", "-fno-gnu-unique", "-shared", "-fPIC", "-I.", unit]
    result = subprocess.run([*command, "-o", library], cwd=folder, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return str(library)


def properties(number: int, shared: int = 232_448) -> SimpleNamespace:
    """Return the properties of a GPU with `number` multiprocessors and `shared` bytes of shared memory for a block."""
    return SimpleNamespace(multi_processor_count=number, shared_memory_per_block_optin=shared)


def activations(tokens: int, hidden: int) -> torch.Tensor:
    return torch.cat([torch.randn(tokens, hidden), torch.full((99, hidden), torch.nan)]).bfloat16()[:tokens]
