"""Every case that `own_kernel` must pass before it may serve; run `python -m pytest`. Uses a GPU too if available."""

import pytest
import torch

from spark_mxfp4 import conformance, registry

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.name)
def test_case(case: conformance.Case, device: str) -> None:
    """The kernel gives the reference's numbers, changes no input, and writes all of its output."""
    result = conformance.run_case(registry.load("own_kernel:OwnKernel"), case, device)
    assert not result.problem
    if result.unsupported:
        pytest.skip(result.unsupported)
