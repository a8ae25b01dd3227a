"""Facts about the machine: processor, memory, disks, port, and the environment variables for the server."""

import errno
import os
import platform
import pwd
import shutil
import socket
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

import psutil

from sparkforge.core import memory
from sparkforge.plan import choose, thresholds
from sparkforge.plan.budget import DEFAULT_UTILIZATION
from validate.facts.fact import Reading
from validate.facts.target import DEFAULT_PORT, Target

ROOT = Path("/")  # where core.memory looks for /proc and the cgroup mounts
LAST_SYSTEM_USER = 999  # SYSTEM_UID_MAX of systemd as Debian and Ubuntu build it
OWN_SHM = "SPARKFORGE_OWN_SHM"
SHM = Path("/dev/shm")  # noqa: S108 - the mount itself


def cgroup_headroom(_: Target) -> int | None:
    """Return the bytes that this container may still use (cgroup v2 or v1); None if no limit is below MemAvailable."""
    machine = memory.measure(ROOT)
    return None if machine.bound == "MemAvailable" else machine.available


def remove_ipc(_: Target) -> bool:
    """Return whether logind deletes this user's shared memory after the last session (logind.conf(5), RemoveIPC).

    System users and lingering users are not affected. logind does not see the private /dev/shm of our system unit
    (deploy/sparkforge.service).
    """
    user = os.getuid()
    if os.environ.get(OWN_SHM):
        return False
    if user <= LAST_SYSTEM_USER or not (ROOT / "run/systemd/seats").is_dir():  # no logind
        return False
    name = str(user)
    with suppress(KeyError):
        name = pwd.getpwuid(user).pw_name
    if (ROOT / "var/lib/systemd/linger" / name).exists():
        return False
    folders = [ROOT / top / "systemd/logind.conf.d" for top in ("usr/lib", "run", "etc")]
    parts = {file.name: file for folder in folders for file in folder.glob("*.conf")}
    value = "yes"
    for file in (ROOT / "etc/systemd/logind.conf", *(parts[name] for name in sorted(parts))):
        with suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                name, _equals, text = line.strip().partition("=")
                value = (text.strip().lower() or "yes") if name.strip() == "RemoveIPC" else value
    return value not in {"no", "false", "off", "0", "n", "f"}


def cpu_flags(_: Target) -> list[str]:
    """Instruction set flags of the first processor: `flags` on x86-64, `Features` on aarch64."""
    for line in (ROOT / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _colon, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(rest.split())
    raise LookupError("/proc/cpuinfo names no flags")


def cache_directory(target: Target) -> str:
    """The folder of vLLM's caches: VLLM_CACHE_ROOT, else XDG_CACHE_HOME/vllm, else ~/.cache/vllm (vllm/envs.py)."""
    env = target.options.environ
    home = Path(env.get("HOME") or Path.home())
    default = Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "vllm"
    return str(Path(env.get("VLLM_CACHE_ROOT") or default).expanduser())


def cache_free(target: Target) -> int:
    """Bytes free on the file system that holds, or will hold, vLLM's caches."""
    directory = Path(cache_directory(target)).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


def guard_gib(target: Target) -> float:
    """Return the GiB below which the memory guard ends the server; the table's value if the guard is off."""
    return (thresholds.configured(target.options.environ) or thresholds.load()).end_gib


def port(target: Target) -> int:
    """The port that the server will listen on."""
    return target.options.port if target.options.port is not None else int(target.argument("--port") or DEFAULT_PORT)


def host(target: Target) -> str:
    """The address that the server will listen on; loopback by default."""
    return target.options.host or target.argument("--host") or "127.0.0.1"


def port_free(target: Target) -> bool:
    """Return whether the port can be bound now. Raises OSError if it fails for another reason than "in use"."""
    family = socket.AF_INET6 if ":" in host(target) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does; a port in TIME_WAIT is free
        try:
            probe.bind((host(target), port(target)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def utilization(target: Target) -> float:
    """The share of memory that vLLM will take."""
    if target.options.gpu_memory_utilization is not None:
        return target.options.gpu_memory_utilization
    return float(target.argument("--gpu-memory-utilization") or DEFAULT_UTILIZATION)


def optimize(target: Target) -> int:
    """Return the server's level of `python -O`: the interpreter's or PYTHONOPTIMIZE's, whichever is higher."""
    text = target.options.environ.get("PYTHONOPTIMIZE", "")
    level = (int(text) if text.isdigit() else 1) if text else 0  # CPython: any other text counts as 1
    return max(level, target.interpreter()[2])


def arguments(target: Target) -> list[str]:
    """Return the arguments for the server, without the value of --api-key, because users share reports."""
    shown: list[str] = []
    for argument in target.options.serve_args:
        hidden = shown and shown[-1] == "--api-key"
        shown.append("***" if hidden else "--api-key=***" if argument.startswith("--api-key=") else argument)
    return shown


def dense_format(target: Target) -> list[str]:
    """The formats of attention's projections and of the LM head: two keys of the plan's BITS."""
    return [*astuple(choose.dense_format(target.options.serve_args, target.options.environ))]


def _variable(fact: str, name: str) -> Reading:
    return Reading(fact, f"environment {name}", lambda target: target.options.environ.get(name))


READINGS = (
    Reading("os.machine", "platform.machine()", lambda _: platform.machine()),
    Reading("os.kernel", "platform.release()", lambda _: platform.release()),
    Reading("os.name", "/etc/os-release", lambda _: platform.freedesktop_os_release().get("PRETTY_NAME", "unnamed")),
    Reading("cpu.flags", "/proc/cpuinfo", cpu_flags),
    Reading("cpu.count", "os.sched_getaffinity(0)", lambda _: len(os.sched_getaffinity(0))),
    Reading("memory.total_bytes", "/proc/meminfo MemTotal", lambda _: psutil.virtual_memory().total),
    Reading("memory.available_bytes", "/proc/meminfo MemAvailable", lambda _: psutil.virtual_memory().available),
    Reading("memory.cgroup_headroom_bytes", "/sys/fs/cgroup memory.max, memory.current", cgroup_headroom),
    Reading("memory.guard_gib", f"environment {thresholds.VARIABLE}", guard_gib),
    Reading("memory.swap_free_bytes", "/proc/meminfo SwapFree", lambda _: psutil.swap_memory().free),
    Reading("memory.largest_process", "psutil", lambda _: memory.largest_process() or None),
    Reading("os.remove_ipc", "logind.conf RemoveIPC, lingering", remove_ipc),
    Reading("shm.total_bytes", "statvfs /dev/shm", lambda _: shutil.disk_usage(SHM).total),
    Reading("disk.cache_directory", "VLLM_CACHE_ROOT, XDG_CACHE_HOME", cache_directory),
    Reading("disk.cache_free_bytes", "statvfs of disk.cache_directory", cache_free),
    Reading("serve.host", "--host", host),
    Reading("serve.port", "--port", port),
    Reading("serve.port_free", "socket.bind((host, port))", port_free),
    Reading("serve.gpu_memory_utilization", "--gpu-memory-utilization", utilization),
    Reading("serve.args", "--serve-args", arguments),
    Reading("serve.dense_format", "--serve-args, SPARK_MXFP4_LINEAR, SPARK_MXFP4_LM_HEAD", dense_format),
    Reading("python.version", "the serving interpreter's platform.python_version()", lambda s: s.interpreter()[0]),
    Reading("python.executable", "--python", lambda target: str(target.options.python)),
    Reading("python.optimize", "sys.flags.optimize, PYTHONOPTIMIZE", optimize),
    _variable("env.flashinfer_cuda_arch_list", "FLASHINFER_CUDA_ARCH_LIST"),
    _variable("env.hf_hub_offline", "HF_HUB_OFFLINE"),
)
