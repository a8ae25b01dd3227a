"""Tests that need a real NVIDIA GPU. Without a GPU they are skipped with a message; CI has none.

On a GPU machine, with a torch for CUDA: `pip install -e . pytest pytest-timeout && python -m pytest tests/device`.
"""

import pytest
import torch

from spark_mxfp4.kernels import extension


@pytest.fixture(autouse=True, scope="session")
def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here: torch.cuda.is_available() is False")


@pytest.fixture(autouse=True)
def same_numbers():
    """Use new random numbers in each run, because a kernel must be right for all."""
    torch.seed()


@pytest.fixture(scope="session")
def compiled_kernels():
    if extension.target(torch.device("cuda")) is None:
        pytest.skip("no kernels of CUDA are compiled for this GPU")
