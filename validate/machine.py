"""Facts about the machine: processor, memory, disks, port, and the environment variables that steer the server."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
from pathlib import Path

from validate.facts import Reading
from validate.scene import DEFAULT_PORT, DEFAULT_UTILIZATION, Scene

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")  # noqa: S108 - the mount itself is what is looked at


def meminfo(field: str) -> int:
    """Bytes of one field of /proc/meminfo, which counts in KiB."""
    for line in MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise LookupError(f"{MEMINFO} has no {field}")


def cgroup_headroom(_: Scene) -> int | None:
    """Bytes this container may still use (cgroup v2 or v1), or None where there is no limit.

    Inactive page cache is counted as usable: the kernel drops it before it kills.
    """
    for limit_file, usage_file, directory in (
        ("memory.max", "memory.current", CGROUP),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", CGROUP / "memory"),
    ):
        if (directory / limit_file).is_file():
            limit = (directory / limit_file).read_text(encoding="ascii").strip()
            if limit == "max" or int(limit) >= meminfo("MemTotal"):
                return None
            used = int((directory / usage_file).read_text(encoding="ascii"))
            return max(0, int(limit) - used + _inactive_file(directory / "memory.stat"))
    return None


def _inactive_file(path: Path) -> int:
    fields = dict(line.split(" ", 1) for line in path.read_text(encoding="ascii").splitlines() if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def cpu_flags(_: Scene) -> list[str]:
    """Instruction set flags of the first processor: `flags` on x86-64, `Features` on aarch64."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _colon, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(rest.split())
    raise LookupError("/proc/cpuinfo names no flags")


def os_name(_: Scene) -> str:
    """The distribution's own name for itself."""
    return platform.freedesktop_os_release().get("PRETTY_NAME", "unnamed")


def cache_directory(scene: Scene) -> str:
    """Where vLLM keeps its caches: VLLM_CACHE_ROOT, else XDG_CACHE_HOME/vllm, else ~/.cache/vllm (vllm/envs.py)."""
    env = scene.options.environ
    home = Path(env.get("HOME") or Path.home())
    default = Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "vllm"
    return str(Path(env.get("VLLM_CACHE_ROOT") or default).expanduser())


def cache_free(scene: Scene) -> int:
    """Bytes free on the file system that holds, or will hold, vLLM's caches."""
    directory = Path(cache_directory(scene)).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


def port(scene: Scene) -> int:
    """The port the server will be told to take."""
    return scene.options.port if scene.options.port is not None else int(scene.argument("--port") or DEFAULT_PORT)


def host(scene: Scene) -> str:
    """The address the server will listen on; loopback unless asked otherwise."""
    return scene.options.host or scene.argument("--host") or "127.0.0.1"


def port_free(scene: Scene) -> bool:
    """Whether the port can be bound now. Other refusals than "in use" (no permission, no such address) raise."""
    family = socket.AF_INET6 if ":" in host(scene) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does: TIME_WAIT is not "taken"
        try:
            probe.bind((host(scene), port(scene)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def utilization(scene: Scene) -> float:
    """The share of memory vLLM will be told to take."""
    if scene.options.gpu_memory_utilization is not None:
        return scene.options.gpu_memory_utilization
    return float(scene.argument("--gpu-memory-utilization") or DEFAULT_UTILIZATION)


def optimize(scene: Scene) -> int:
    """Level of `python -O` that the server will run with: the interpreter's own, or what PYTHONOPTIMIZE asks for."""
    told = scene.options.environ.get("PYTHONOPTIMIZE", "")
    asked = (int(told) if told.isdigit() else 1) if told else 0  # CPython: any other text counts as 1
    return max(asked, scene.interpreter()[2])


def arguments(scene: Scene) -> list[str]:
    """The arguments for the server, without the value of --api-key: reports are passed on."""
    words: list[str] = []
    for word in scene.options.serve_args:
        hidden = words and words[-1] == "--api-key"
        words.append("***" if hidden else "--api-key=***" if word.startswith("--api-key=") else word)
    return words


def _variable(fact: str, name: str) -> Reading:
    return Reading(fact, f"environment {name}", lambda scene: scene.options.environ.get(name))


READINGS = (
    Reading("os.machine", "platform.machine()", lambda _: platform.machine()),
    Reading("os.kernel", "platform.release()", lambda _: platform.release()),
    Reading("os.name", "/etc/os-release", os_name),
    Reading("cpu.flags", "/proc/cpuinfo", cpu_flags),
    Reading("cpu.count", "os.sched_getaffinity(0)", lambda _: len(os.sched_getaffinity(0))),
    Reading("memory.total_bytes", "/proc/meminfo MemTotal", lambda _: meminfo("MemTotal")),
    Reading("memory.available_bytes", "/proc/meminfo MemAvailable", lambda _: meminfo("MemAvailable")),
    Reading("memory.cgroup_headroom_bytes", "/sys/fs/cgroup memory.max, memory.current", cgroup_headroom),
    Reading("shm.total_bytes", "statvfs /dev/shm", lambda _: shutil.disk_usage(SHM).total),
    Reading("disk.cache_directory", "VLLM_CACHE_ROOT, XDG_CACHE_HOME", cache_directory),
    Reading("disk.cache_free_bytes", "statvfs of disk.cache_directory", cache_free),
    Reading("serve.host", "--host", host),
    Reading("serve.port", "--port", port),
    Reading("serve.port_free", "socket.bind((host, port))", port_free),
    Reading("serve.gpu_memory_utilization", "--gpu-memory-utilization", utilization),
    Reading("serve.args", "--serve-args", arguments),
    Reading("python.version", "the serving interpreter's platform.python_version()", lambda s: s.interpreter()[0]),
    Reading("python.executable", "--python", lambda scene: str(scene.options.python)),
    Reading("python.optimize", "sys.flags.optimize, PYTHONOPTIMIZE", optimize),
    _variable("env.flashinfer_cuda_arch_list", "FLASHINFER_CUDA_ARCH_LIST"),
    _variable("env.hf_hub_offline", "HF_HUB_OFFLINE"),
)
