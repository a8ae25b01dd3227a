"""Kernels compiled beforehand: their files, when they are loaded, and messages of a build, with a fake nvcc.

test_linear_kernel.py uses the real nvcc.
"""

import shutil
import stat
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spark_mxfp4.experts import ExpertWeights, Projection
from spark_mxfp4.kernels import attention, extension, hopper, linear, precompile, router
from spark_mxfp4.kernels.gpu import GpuKernel


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(precompile, "COMPILED", tmp_path / "compiled")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    return tmp_path / "compiled"


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    program = tmp_path / "cuda" / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(
        '#!/bin/sh\ncase "$*" in *120a*) echo "ptxas fatal: no" >&2; exit 2;; esac\n'
        'line="$*"\nwhile [ "$1" != -o ]; do shift; done\necho "$line" > "$2"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))


def test_the_libraries_of_a_target_are_made_once_from_all_their_units(compiled, fake_nvcc):
    paths = precompile.compile_target("90a")
    assert [path.name.split("-")[0] for path in paths] == ["hopper", "linear", "router", "step"]
    assert {path.parent for path in paths} == {compiled}
    assert sorted(path.name for path in compiled.iterdir()) == sorted(path.name for path in paths)  # no leftovers
    line = paths[0].read_text()
    objects = [Path(word) for word in line.split() if word.endswith(".o")]
    # nvcc names intermediate files after the source, which several units share, so each unit has its own folder.
    assert len({path.parent for path in objects}) == len(objects) == len(precompile.units(precompile.HOPPER))
    assert "-shared" in line
    assert "code=sm_90a" in line
    before = paths[0].stat().st_mtime_ns
    assert precompile.compile_target("90a") == paths
    assert paths[0].stat().st_mtime_ns == before


def test_12_1s_kernels_can_be_built_for_hopper_with_a_memory_limit(compiled, fake_nvcc, monkeypatch):
    [limited] = precompile.compile_target(precompile.LIMITED)
    monkeypatch.setenv("SPARK_PACE", "234")
    [paced] = precompile.compile_target(precompile.LIMITED)
    assert limited.name.startswith("layer-")
    for path, pace in ((limited, False), (paced, True)):
        line = path.read_text()
        assert ("code=sm_90a" in line, "-DSPARK_SMALL" in line, "-DSPARK_PACE=234" in line) == (True, True, pace)
        assert line.count(".o") == len(precompile.units(precompile.LAYER))


def test_a_library_of_other_sources_is_not_loaded(compiled, fake_nvcc, tmp_path, monkeypatch):
    copy = tmp_path / "kernels"
    shutil.copytree(precompile.FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    monkeypatch.setattr(precompile, "FOLDER", copy)
    path = precompile.compile_target("121a")[0]
    assert precompile.library("layer", "121a") == path
    header = copy / "overlap.cuh"
    header.write_text(header.read_text() + "// changed\n")
    assert precompile.library("layer", "121a") is None


@pytest.mark.parametrize(("capability", "target"), [((9, 0), "90a"), ((12, 1), "121a")])
def test_libraries_are_compiled_once(compiled, fake_nvcc, tmp_path, monkeypatch, claim_gpu, capability, target):
    bound = []
    monkeypatch.setattr(extension, "bind", lambda path, _functions: bound.append(path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    claim_gpu(get_device_capability=capability)
    device = torch.device("cuda", 7)
    loads = (hopper.library.__wrapped__, *(partial(m.load.__wrapped__, device) for m in (linear, router, attention)))
    for load in loads:
        with pytest.raises(NotImplementedError, match=r"there is no nvcc in .*/bin · install CUDA 13's compiler"):
            load()
    assert not hopper.HopperKernel.available(device)
    for home in ("cuda", "."):  # compile, then find the library without a compiler
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
        assert hopper.HopperKernel.available(device)
        for load in loads:
            load()
    assert {Path(path).parent for path in bound} == {tmp_path / "cache" / "spark-mxfp4" / "compiled"}
    assert bound[: len(loads)] == bound[len(loads) :]
    bound.clear()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    paths = precompile.compile_target(target)
    for load in loads:
        load()
    assert bound == list(map(str, paths))


def test_a_failed_build_prints_its_error_and_leaves_no_files(compiled, fake_nvcc, capsys):
    assert precompile.main(["120a"]) == 1
    assert "ptxas fatal: no" in capsys.readouterr().err
    assert list(compiled.iterdir()) == []
    assert precompile.main(["89"]) == 1
    assert "there are no kernels for '89' · targets are 90a, 120a, 121a" in capsys.readouterr().err


def test_amds_gpus_are_refused_by_name(claim_gpu):
    """AMD's gfx90a reports the compute capability 9.0, as Hopper does, and torch calls the device cuda."""
    claim_gpu("7.1", get_device_capability=(9, 0))
    device = torch.device("cuda", 6)
    assert not hopper.HopperKernel.available(device)
    with pytest.raises(NotImplementedError, match="dense kernels cannot run"):
        linear.load.__wrapped__(device)

    weights = ExpertWeights(*(Projection(SimpleNamespace(device=device)) for _ in range(2)))
    with pytest.raises(NotImplementedError, match="cannot run on an AMD GPU · none of its kernels was compiled"):
        GpuKernel().prepare(weights)


def test_an_error_of_a_launch_is_raised_with_cudas_message(claim_gpu):
    claim_gpu(current_stream=SimpleNamespace(cuda_stream=None))
    library = SimpleNamespace(start=lambda result, _stream: result, spark_error=lambda error: b"error %d" % error)
    launch = partial(extension.launch, library, "start", device=torch.device("cuda"))
    assert launch(0) is True
    assert launch(extension.NO_FIT) is False
    with pytest.raises(RuntimeError, match="CUDA says: error 98 · run again with CUDA_LAUNCH_BLOCKING=1"):
        launch(98)


def test_rows_that_cannot_be_loaded_by_16_bytes_are_copied():
    x = torch.arange(64).view(4, 16).bfloat16()
    assert extension.aligned(x) is x
    for view in (x[:, 1:9], x[:, ::2], x.T, torch.ones(4, 20).bfloat16()[:, :16]):
        copy = extension.aligned(view)
        assert copy.is_contiguous()
        assert torch.equal(copy, view)


def test_cross_compiled_libraries_have_the_target_machine_in_their_names(compiled, fake_nvcc, monkeypatch):
    """The test sets the variable from which setuptools takes the platform for the wheel's name."""
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-sparc64")
    assert {path.name.split("-")[2] for path in precompile.compile_target("121a")} == {"sparc64"}
    monkeypatch.delenv("_PYTHON_HOST_PLATFORM")
    assert precompile.library("linear", "121a") is None
