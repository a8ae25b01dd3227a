"""Facts about the GPU, from an nvidia-smi and a libcuda that answer, refuse, crash or hang."""

import re
from types import SimpleNamespace

import pytest

from validate.facts import gpu
from validate.facts.fact import take


def smi(tmp_path, script):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_nvidia_smi_tells(target, tmp_path, monkeypatch):
    env = smi(tmp_path, "echo 'NVIDIA GB10, 580.142, 12.1'; echo \"$*\" > " + str(tmp_path / "args"))
    validated = target(environ=env)
    values = {r.name: take(r, validated).value for r in gpu.SMI_READINGS}
    assert values == {
        "gpu.name": "NVIDIA GB10", "gpu.driver_version": "580.142", "gpu.compute_capability": "12.1", "gpu.count": 1,
    }  # fmt: skip
    monkeypatch.setenv("PATH", env["PATH"])
    assert gpu.name() == "NVIDIA GB10"
    assert (tmp_path / "args").read_text() == "--query-gpu=name,driver_version,compute_cap --format=csv,noheader\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "ended with code 18: Failed"),
        ("echo 'No devices were found'", "lists no GPU"),
        ("sleep 60", r"did not answer within 0\.3 s"),
        ("kill -9 $$", "signal 9"),
    ],
)
def test_nvidia_smi_fails(target, tmp_path, monkeypatch, script, why):
    monkeypatch.setattr("sparkforge.core.gpus.SECONDS", 0.3 if "sleep" in script else 60.0)
    validated = target(environ=smi(tmp_path, script))
    for reading in gpu.SMI_READINGS:
        assert re.search(why, take(reading, validated).error)


class FakeCuda:
    """The five libcuda functions that the validator calls, with a GB10's answers."""

    def __init__(self, version=13000, init=0, devices=1):
        self.values = {"cuDriverGetVersion": version, "cuDeviceGetCount": devices}
        self.cuInit = lambda _flags: init

    def __getattr__(self, name):
        def answer(out, attribute=None, _device=None):
            out._obj.value = self.values[name] if name in self.values else {75: 12, 76: 1, 18: 1}[attribute]
            return 0

        return answer


@pytest.mark.parametrize(
    ("cuda", "answer"),
    [
        (FakeCuda(), {"api": "13.0", "count": 1, "capability": "12.1", "integrated": True}),
        (FakeCuda(devices=0), {"api": "13.0", "count": 0}),
        (FakeCuda(init=999), {"error": "cuInit returned CUDA error 999"}),
    ],
)
def test_libcuda_is_asked(monkeypatch, cuda, answer):
    monkeypatch.setattr(gpu, "ctypes", SimpleNamespace(**{**vars(gpu.ctypes), "CDLL": lambda _name: cuda}))
    assert gpu.query_libcuda() == answer


def test_libcuda_that_crashes_or_hangs_does_not_take_us_along(target, tmp_path, monkeypatch):
    for body, why in (("import os; os.abort()", "signal 6"), ("import time; time.sleep(60)", "did not answer within")):
        (tmp_path / "sitecustomize.py").write_text(body)
        monkeypatch.setattr(gpu, "SECONDS", 0.5 if "sleep" in body else 60.0)
        validated = target(environ={"PYTHONPATH": str(tmp_path)})
        assert all(why in take(reading, validated).error for reading in gpu.CUDA_READINGS)
