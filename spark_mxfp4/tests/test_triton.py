"""The Triton kernels, run by Triton's interpreter on a CPU, against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = ("sorting", "whole_layer", "silu", "expert_map", "extreme_scales", "w4a8", "mxfp8")


@pytest.fixture(scope="module")
def interpreted():
    """Return the output of one interpreter process, which runs every check to import torch and Triton only once."""
    seed = str(int.from_bytes(os.urandom(3)))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted.py")), seed, *CHECKS],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return result.stdout.splitlines(), f"seed {seed}: {result.stderr}"


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(interpreted, check):
    passed, why = interpreted
    assert check in passed, why


def test_unsupported_weights_and_sizes_give_an_error_that_names_them():
    import torch

    from spark_mxfp4.experts import ExpertWeights, Projection
    from spark_mxfp4.kernels import fused

    def weights(experts, scales=True):
        packed = Projection(
            torch.zeros(experts, 64, 16, dtype=torch.uint8), torch.zeros(experts, 64, 1, dtype=torch.uint8)
        )
        return ExpertWeights(packed, packed if scales else packed._replace(scales=None))

    x, ids = torch.zeros(2, 32), torch.zeros(2, 1, dtype=torch.int32)
    for operands, routing, message in (
        (weights(1, scales=False), ids, "not packed MXFP4"),
        (weights(513), ids, "513 experts are more than 512"),
        (weights(1), torch.zeros(2, 17, dtype=torch.int32), "top-k is 17, more than 16"),
    ):
        with pytest.raises(ValueError, match=message):
            fused.moe(x, operands, routing, torch.ones(routing.shape))
