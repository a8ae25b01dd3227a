"""Facts about the GPU: from nvidia-smi for the driver, from libcuda in a child process for CUDA."""

import ctypes
import json
import sys

from sparkforge.core import gpus
from sparkforge.core.files import parse_json
from sparkforge.core.process import ProbeError, ask, require
from validate.facts.fact import Reading
from validate.facts.target import Options, Target, once

SECONDS = 5.0
SMI_FIELDS = {"name": "gpu.name", "driver_version": "gpu.driver_version", "compute_cap": "gpu.compute_capability"}
# CUdevice_attribute numbers of cuda.h: 75 COMPUTE_CAPABILITY_MAJOR, 76 _MINOR, 18 INTEGRATED.
MAJOR, MINOR, INTEGRATED = 75, 76, 18


@once
def nvidia_smi(target: Target) -> tuple[dict[str, str], ...]:
    """Return a table of SMI_FIELDS per GPU. Raises ProbeError if nvidia-smi is absent, fails or hangs."""
    return tuple(gpus.query(*SMI_FIELDS, env=target.options.environ))


def name() -> str:
    """Return the name of this machine's first GPU; empty if nvidia-smi names none."""
    try:
        return nvidia_smi(Target(Options(), ""))[0]["name"]
    except ProbeError:
        return ""


@once
def libcuda(target: Target) -> dict[str, object]:
    """Return the result of `query_libcuda`. It runs in a child process, because cuInit may crash or hang.

    Raises ProbeError if libcuda is absent, fails, crashes or hangs.
    """
    code = f"import sys; sys.path[:0] = {sys.path!r}; from validate.facts.gpu import main; main()"
    answer = ask([sys.executable, "-c", code], seconds=SECONDS, env=target.options.environ)
    result = parse_json(require(answer, "the libcuda probe", SECONDS), "the libcuda probe's answer")
    if "error" in result:
        raise ProbeError(result["error"])
    return dict(result)


def query_libcuda() -> dict[str, object]:
    """Query libcuda for its version and the first device's capability; {"error": why} if it is absent or fails."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": f"libcuda.so.1 cannot be loaded: {error}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    for name, code in (
        ("cuDriverGetVersion", cuda.cuDriverGetVersion(ctypes.byref(version))),
        ("cuInit", cuda.cuInit(0)),
        ("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count))),
    ):
        if code != 0:
            return {"error": f"{name} returned CUDA error {code}"}
    # cuDriverGetVersion counts 1000 * major + 10 * minor.
    result: dict[str, object] = {"api": f"{version.value // 1000}.{version.value % 1000 // 10}", "count": count.value}
    if count.value:
        result["capability"] = f"{_attribute(cuda, MAJOR)}.{_attribute(cuda, MINOR)}"
        result["integrated"] = bool(_attribute(cuda, INTEGRATED))
    return result


def _attribute(cuda: ctypes.CDLL, number: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    return value.value


def main() -> None:
    """Print `query_libcuda()` as JSON; the child process of `libcuda`."""
    print(json.dumps(query_libcuda()))


def _smi(field: str) -> Reading:
    return Reading(SMI_FIELDS[field], f"nvidia-smi --query-gpu={field}", lambda target: nvidia_smi(target)[0][field])


def _memory(kind: str) -> Reading:
    """Return the reading of a GPU's `total` or `free` memory in MiB; none on a GB10, which reports [N/A]."""

    def read(target: Target) -> float | None:
        return gpus.number(gpus.query(f"memory.{kind}", units=False, env=target.options.environ)[0][f"memory.{kind}"])

    return Reading(f"gpu.memory_{kind}_mib", f"nvidia-smi --query-gpu=memory.{kind}", read)


def _cuda(name: str, key: str, function: str) -> Reading:
    def read(target: Target) -> object:
        if key not in libcuda(target):
            raise ProbeError("libcuda sees no device")
        return libcuda(target)[key]

    return Reading(name, f"libcuda.so.1 {function}", read)


SMI_READINGS = (
    *(_smi(field) for field in SMI_FIELDS),
    Reading("gpu.count", "nvidia-smi --query-gpu=name", lambda target: len(nvidia_smi(target))),
)
MEMORY_READINGS = (_memory("total"), _memory("free"))
STATE = f"nvidia-smi --query-gpu={','.join(gpus.STATE_FIELDS)}"
STATE_READINGS = (Reading("gpu.state", STATE, lambda target: gpus.states(target.options.environ)[0]),)
CUDA_READINGS = (
    _cuda("cuda.driver_api", "api", "cuDriverGetVersion"),
    _cuda("cuda.device_count", "count", "cuDeviceGetCount"),
    _cuda("cuda.compute_capability", "capability", "cuDeviceGetAttribute"),
    _cuda("cuda.integrated", "integrated", "cuDeviceGetAttribute CU_DEVICE_ATTRIBUTE_INTEGRATED"),
)
GROUPS = (SMI_READINGS, STATE_READINGS, MEMORY_READINGS, CUDA_READINGS)
