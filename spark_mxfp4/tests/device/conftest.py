"""Tests that need a real NVIDIA GPU: without one they are skipped, and say so; CI has none and runs none of them.

On a GPU machine, with a torch for CUDA: `pip install -e . pytest pytest-timeout && python -m pytest tests/device`.
"""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here: torch.cuda.is_available() is False")


@pytest.fixture(autouse=True)
def same_numbers():
    """Other numbers each time: a kernel must be right for all of them."""
    torch.seed()
