"""Facts about the GPU, from an nvidia-smi and a libcuda that answer, refuse, crash or hang."""

import re

import pytest
from programs import compile_library, write_program

from validate.facts import gpu
from validate.facts.fact import take


def smi(tmp_path, script):
    write_program(tmp_path / "nvidia-smi", script)
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
    [("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "ended with code 18: Failed"),
     ("echo 'No devices were found'", "lists no GPU"), ("kill -9 $$", "signal 9"),
     ("sleep 60", r"did not answer within 0\.3 s")],
)  # fmt: skip
def test_nvidia_smi_fails(target, tmp_path, monkeypatch, script, why):
    monkeypatch.setattr("sparkforge.core.gpus.SECONDS", 0.3 if "sleep" in script else 60.0)
    validated = target(environ=smi(tmp_path, script))
    for reading in gpu.SMI_READINGS:
        assert re.search(why, take(reading, validated).error)


LIBCUDA = """
#include <stdlib.h>
#include <unistd.h>
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { INIT }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 12 : 1; return 0; }
"""


@pytest.mark.needs("cc")
@pytest.mark.parametrize(
    ("init", "count", "values"),
    [
        ("return 0;", 1, ["13.0", 1, "12.1", True]),
        ("return 0;", 0, ["13.0", 0, "libcuda sees no device", "libcuda sees no device"]),
        ("return 999;", 1, ["cuInit returned CUDA error 999"] * 4),
        ("abort();", 1, ["the libcuda probe was killed by signal 6: it printed nothing"] * 4),
        ("for (;;) pause();", 1, ["the libcuda probe did not answer within 2 s"] * 4),
    ],
)
def test_libcuda_is_asked_and_does_not_take_us_along(target, tmp_path, monkeypatch, init, count, values):
    """C compiler, loader and process are real; the driver is a fake."""
    text = LIBCUDA.replace("INIT", init).replace("COUNT", str(count))
    compile_library(tmp_path / "libcuda.so.1", text, language="c")
    monkeypatch.setattr(gpu, "SECONDS", 2.0 if "pause" in init else 60.0)
    validated = target(environ={"LD_LIBRARY_PATH": str(tmp_path)})
    facts = [take(reading, validated) for reading in gpu.CUDA_READINGS]
    assert [fact.error or fact.value for fact in facts] == values
