"""Checks of the machine: processor, GPU, driver, memory, disk, port."""

from __future__ import annotations

from validate import devices, serving
from validate.budget import HOST_WORKING_BYTES, share_lines
from validate.devices import GIB
from validate.finding import Check, Judgement, View, failed, judged, passed, warned

MIN_DRIVER = 580  # first driver branch with CUDA 13.0 (CUDA 13.0 release notes, table of minimum driver versions)
RISKY_DRIVERS = range(590, 600)  # public report of hanging CUDA graphs on GB10: conselara.dev, DGX Spark GB10 reference
MIN_CUDA = (13, 0)  # 12.1a kernels of this stack are built with CUDA 13
# Public reports from GB10 call 0.85-0.87 the safe range: the system itself lives in the same memory.
SAFE_UTILIZATION = 0.87
DISK_FAIL, DISK_WARN = 2 * GIB, 10 * GIB  # our own bounds: torch.compile, Triton and FlashInfer caches
SHM_WARN = GIB  # Docker gives 64 MiB unless told otherwise
NO_GPU = "nvidia-smi   # if it fails here, start the container with --gpus all"
SAFER = "--gpu-memory-utilization 0.85"
FREE_MEMORY = "stop other programs, then: sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"


def gib(count: float) -> str:
    """Format bytes as GiB, or as MiB where that says more."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def architecture(view: View) -> Judgement:
    """DGX Spark is aarch64."""
    machine = view.text("os.machine")
    return judged(machine == "aarch64", f"this machine is {machine}, DGX Spark is aarch64")


def cpu_instructions(view: View) -> Judgement:
    """VLLM's CPU build needs AVX2 on x86-64 and Advanced SIMD on aarch64."""
    machine, flags = view.text("os.machine"), set(view.names("cpu.flags"))
    wanted, better = {"x86_64": ("avx2", "avx512f"), "aarch64": ("asimd", "bf16")}.get(machine, ("", ""))
    if not wanted:
        return failed(f"vLLM's CPU build is made for x86_64 and aarch64, this machine is {machine}")
    if wanted not in flags:
        return failed(f"this {machine} processor has no {wanted}")
    if better not in flags:
        return warned(f"{wanted} is there, {better} is not: it serves, slowly", f"a processor with {better} is faster")
    return passed(f"{machine} with {wanted} and {better}")


def gpu_name(view: View) -> Judgement:
    """The GPU is a GB10, and there is one."""
    name, count = view.text("gpu.name"), view.number("gpu.count")
    if "GB10" not in name.replace("-", " ").split():
        return failed(f"the GPU is {name}, this profile is for GB10", "python -m validate --profile embedded")
    return judged(count == 1, f"{count:g} x {name}", "CUDA_VISIBLE_DEVICES=0   # a Spark has one GPU")


def gpu_capability(view: View) -> Judgement:
    """nvidia-smi and CUDA agree on 12.1."""
    told, seen = view.text("gpu.compute_capability"), view.text("cuda.compute_capability")
    if told != seen:
        return failed(f"nvidia-smi says {told}, CUDA says {seen}", "sudo reboot   # driver and libraries differ")
    return judged(seen == "12.1", f"compute capability {seen}, wanted 12.1")


def driver_version(view: View) -> Judgement:
    """The driver knows CUDA 13."""
    major, told = view.version("gpu.driver_version")[0], view.text("gpu.driver_version")
    if major in RISKY_DRIVERS:
        return warned(
            f"driver {told}: CUDA graphs are reported to hang on GB10 with the 590 branch",
            "--enforce-eager   # if the server hangs; reports are good for the 580 branch",
        )
    return judged(major >= MIN_DRIVER, f"driver {told}, wanted {MIN_DRIVER} or later")


def cuda_version(view: View) -> Judgement:
    """Driver API, runtime and torch are all of CUDA 13.0 or later."""
    driver, runtime = view.version("cuda.driver_api"), view.version("cuda.runtime_version")
    evidence = f"driver API {view.text('cuda.driver_api')}, runtime {view.text('cuda.runtime_version')}"
    if driver < MIN_CUDA:
        return failed(f"{evidence}: the driver must know CUDA 13.0", "sudo apt update && sudo apt full-upgrade")
    if runtime < MIN_CUDA:
        return failed(f"{evidence}: the runtime must be 13.0 or later")
    return judged(driver[0] >= runtime[0], f"{evidence}; the driver must not be a major version behind")


def usable_memory(view: View) -> float:
    """Bytes that can be had: what the kernel calls available, within the container's limit."""
    available = view.number("memory.available_bytes")
    limit = "memory.cgroup_headroom_bytes"
    return available if view.is_none(limit) else min(available, view.number(limit))


def needed_bytes(view: View) -> float:
    """Bytes that vLLM's share must hold at its start: the plan's lines for one sequence as long as it may be."""
    model, weights = serving.architecture(view), int(view.number("model.weight_bytes"))
    lines = share_lines(model, devices.table()["spark"], serving.load(view, model), weights)
    return sum(line.bytes for line in lines)


def memory_unified(view: View) -> Judgement:
    """Enough unified memory is free for the weights, and for what vLLM will ask for at startup."""
    share, total = view.number("serve.gpu_memory_utilization"), view.number("memory.total_bytes")
    free, weights = usable_memory(view), view.number("model.weight_bytes")
    if not 0 < share <= 1:
        return failed(f"--gpu-memory-utilization {share:g} is not above 0 and at most 1", SAFER)
    # vllm/v1/worker/utils.py request_memory: refuses to start when free < ceil(total * share).
    wanted, needed = share * total, needed_bytes(view)
    room = f"{gib(weights)} of weights and {gib(needed - weights)} for one sequence of --max-model-len and to work"
    if free < needed:
        return failed(f"{gib(free)} free, {gib(needed)} needed: {room}")
    if wanted < needed:
        return failed(
            f"{share:g} of {gib(total)} is {gib(wanted)}, {gib(needed)} are needed: {room}",
            "raise --gpu-memory-utilization, or lower --max-model-len: ./inv plan shows both",
        )
    if free < wanted:
        # What is needed is free: a smaller share would serve, with a smaller KV cache.
        return failed(
            f"{gib(free)} free, and vLLM refuses to start under {gib(wanted)} ({share:g} of {gib(total)})",
            f"{FREE_MEMORY}; or --gpu-memory-utilization {int(100 * free / total) / 100:.2f}",
        )
    evidence = f"{gib(free)} free of {gib(total)}; vLLM may take {gib(wanted)}, weights {gib(weights)}"
    if share > SAFE_UTILIZATION:
        left = f"that leaves the system {gib(total - wanted)}, and the share is no bound (vLLM issue 46307)"
        return warned(f"{evidence}: {left}", SAFER)
    return passed(evidence)


def memory_host(view: View) -> Judgement:
    """Enough memory is free for the CPU server."""
    free, weights = usable_memory(view), view.number("model.weight_bytes")
    needed = weights + HOST_WORKING_BYTES
    return judged(free >= needed, f"{gib(free)} free, {gib(needed)} needed (weights {gib(weights)})")


def disk_space(view: View) -> Judgement:
    """The caches have room."""
    free, where = view.number("disk.cache_free_bytes"), view.text("disk.cache_directory")
    evidence = f"{gib(free)} free for {where}"
    return failed(evidence) if free < DISK_FAIL else warned(evidence) if free < DISK_WARN else passed(evidence)


def shared_memory(view: View) -> Judgement:
    """The shared memory is larger than Docker's default."""
    total = view.number("shm.total_bytes")
    return judged(total >= SHM_WARN, f"{gib(total)} in /dev/shm, {gib(SHM_WARN)} advised")


def port_free(view: View) -> Judgement:
    """Nobody listens on the port."""
    port = view.number("serve.port")
    free = view.flag("serve.port_free")
    fix = f"ss -ltnp 'sport = :{port:g}'   # shows who; stop it, or choose another --port"
    return judged(free, f"port {port:g} is {'free' if free else 'taken'}", fix)


CHECKS = (
    Check(
        "architecture",
        "The processor is aarch64, as in every DGX Spark.",
        ("os.machine",),
        architecture,
        "python -m validate --profile embedded   # the profile for other machines",
    ),
    Check(
        "cpu-instructions",
        "The processor has the instructions vLLM's CPU build is compiled for.",
        ("os.machine", "cpu.flags"),
        cpu_instructions,
        "grep -m1 -E 'flags|Features' /proc/cpuinfo",
    ),
    Check("gpu-name", "nvidia-smi names one GB10.", ("gpu.name", "gpu.count"), gpu_name, NO_GPU),
    Check(
        "gpu-capability",
        "Compute capability is 12.1, by nvidia-smi and by CUDA itself.",
        ("gpu.compute_capability", "cuda.compute_capability"),
        gpu_capability,
        NO_GPU,
    ),
    Check(
        "driver-version",
        "The driver is of branch 580 or later, and not of 590.",
        ("gpu.driver_version",),
        driver_version,
        "sudo apt update && sudo apt full-upgrade && sudo reboot",
    ),
    Check(
        "cuda-version",
        "CUDA is 13.0 or later, in the driver and in the runtime.",
        ("cuda.driver_api", "cuda.runtime_version"),
        cuda_version,
        "install the locked set again: ./inv up",
    ),
    Check(
        "memory-unified",
        "Unified memory that can really be had covers the weights and what vLLM will ask for.",
        (
            "memory.total_bytes",
            "memory.available_bytes",
            "memory.cgroup_headroom_bytes",
            "model.weight_bytes",
            "model.config",
            "serve.gpu_memory_utilization",
            "serve.args",
        ),
        memory_unified,
        FREE_MEMORY,
    ),
    Check(
        "memory-host",
        "Free memory covers the weights and the server.",
        ("memory.available_bytes", "memory.cgroup_headroom_bytes", "model.weight_bytes"),
        memory_host,
        "ps aux --sort=-rss | head   # stop something large",
    ),
    Check(
        "disk-space",
        "The disk with vLLM's caches has room.",
        ("disk.cache_free_bytes", "disk.cache_directory"),
        disk_space,
        "VLLM_CACHE_ROOT=/a/larger/disk, or free some space",
    ),
    Check(
        "shared-memory",
        "The shared memory in /dev/shm is not Docker's 64 MiB.",
        ("shm.total_bytes",),
        shared_memory,
        "start the container with --ipc=host or --shm-size=8g",
    ),
    Check(
        "port-free",
        "The server's port can be bound.",
        ("serve.port", "serve.port_free"),
        port_free,
        "choose another --port",
    ),
)
