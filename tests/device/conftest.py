"""Tests that need a real NVIDIA GPU: without one they are skipped, and say so; CI has none and runs none of them.

On a GPU machine without this project's environment, in the repository:
`PYTHONPATH=. python -m pytest tests/device -c /dev/null --rootdir tests/device --confcutdir tests/device`.
"""

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "device: needs a real GPU")


@pytest.fixture(autouse=True, scope="session")
def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here: torch.cuda.is_available() is False")
