"""The Triton kernels, run by Triton's interpreter on a CPU, against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from project import PROJECT
from spark_mxfp4.experts import ExpertWeights, Projection
from spark_mxfp4.kernels import fused


def test_the_kernels_by_tritons_interpreter():
    """Triton decides at import whether it interprets, so the tests run in another process."""
    tests = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert "7 passed" in result.stdout, result.stdout


def test_unsupported_weights_and_sizes_give_an_error_that_names_them():
    def weights(experts, scales=True):
        weight, scale = (torch.zeros(experts, 64, width, dtype=torch.uint8) for width in (16, 1))
        packed = Projection(weight, scale)
        return ExpertWeights(packed, packed if scales else Projection(weight))

    x, ids = torch.zeros(2, 32), torch.zeros(2, 1, dtype=torch.int32)
    for operands, routing, message in (
        (weights(1, scales=False), ids, "not packed MXFP4"),
        (weights(513), ids, "513 experts are more than 512"),
        (weights(1), torch.zeros(2, 17, dtype=torch.int32), "top-k is 17, more than 16"),
    ):
        with pytest.raises(ValueError, match=message):
            fused.moe(x, operands, routing, torch.ones(routing.shape))
