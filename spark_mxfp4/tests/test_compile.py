"""Compile the Triton kernels without a GPU and audit their machine code: instructions, spills, shared memory."""

import dataclasses
import json
import subprocess
import sys

import pytest

from project import PROJECT
from spark_mxfp4.kernels import fused, offline

BY_NAME = {target.name: target for target in offline.TARGETS}
# The first product does everything that the second does, plus SwiGLU and the gather. Only main targets compile both.
PRODUCTS = [
    (target, tiles, top_k)
    for target in offline.TARGETS
    for tiles in offline.tiles_of(target)
    for top_k in ((offline.TOP_K, 0) if target.name in {"9.0", "12.1"} else (offline.TOP_K,))
]


@pytest.mark.parametrize(("target", "tiles", "top_k"), PRODUCTS, ids=lambda value: getattr(value, "name", None))
def test_products_use_the_tensor_cores_without_spilling(target, tiles, top_k):
    compiled = offline.product(tiles, target, top_k)
    assert compiled.problems() == []
    if target.name == "12.1":
        assert any(name.startswith("QMMA.SF") for name in compiled.matrix) is tiles.scaled
        assert any(name.startswith("HMMA") for name in compiled.matrix) is not tiles.scaled


@pytest.mark.parametrize("capability", ["9.0", "12.1"])
def test_the_small_kernels_compile_without_spilling(capability):
    assert [problem for row in offline.helpers(BY_NAME[capability]) for problem in row.problems()] == []


def test_only_the_spark_has_scaled_tiles_and_an_old_triton_none(monkeypatch):
    assert {name for name in BY_NAME if any(t.scaled for t in offline.tiles_of(BY_NAME[name]))} == {"12.1"}
    monkeypatch.setattr(fused.triton, "__version__", "3.7.1")
    assert [tiles.scaled for tiles in offline.tiles_of(BY_NAME["12.1"])] == [False] * 3
    assert not offline.native_scaling()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, []), ({"matrix": {"HMMA.16816.F32.BF16": 8}}, ["no QMMA.SF, but HMMA.16816.F32.BF16"]),
        ({"matrix": {}}, ["no QMMA.SF, but no matrix instruction"]), ({"spills": 3}, ["3 accesses to local memory"]),
        ({"shared": 101377}, ["101377 bytes of shared memory, more than 101376"]),
        ({"instructions": 0}, ["no instructions"]), ({"wanted": None, "matrix": {}}, []),
    ],
)  # fmt: skip
def test_problems_of_a_kernel_are_reported(change, problem):
    right = offline.Compiled("gate_up", "12.1", "QMMA.SF", {"QMMA.SF.16832": 4}, 0, 100, 66000, 101376)
    assert dataclasses.replace(right, **change).problems() == problem


def test_the_command_refuses_an_unknown_capability():
    command = [sys.executable, "-m", "spark_mxfp4.kernels.offline", "--capabilities", "12.0,7.5"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "no such capability: 7.5 · choose from 8.0, 8.9" in result.stderr


def test_committed_tables_have_every_target_and_no_problem_in_a_selected_kernel():
    files = sorted((PROJECT / "bench" / "results").glob("triton-*-compiled.json"))
    assert len(files) == 3
    for file in files:
        table = json.loads(file.read_text())
        rows = [offline.Compiled(**row) for row in table["kernels"]]
        assert file.name == f"triton-{table['triton']}-compiled.json"
        assert {row.capability for row in rows} == set(BY_NAME), file
        assert [row for row in rows if row.chosen and row.problems()] == [], file
