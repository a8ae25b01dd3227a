"""Checks of the machine: processor, GPU, driver, memory, disk, port."""

from packaging.version import Version

from sparkforge.core.gpus import GpuState
from sparkforge.core.memory import in_gib as gib
from sparkforge.plan import capabilities, devices, thresholds
from sparkforge.plan.budget import HOST_WORKING_BYTES, most_tokens, share_lines
from sparkforge.plan.devices import GIB
from validate.checks import serving
from validate.checks.finding import CheckList, CheckResult, View, failed, judged, passed, warned

RISKY_DRIVERS = range(590, 600)  # public report of hanging CUDA graphs on GB10: conselara.dev, DGX Spark GB10 reference
MIN_CUDA = Version("13.0")  # 12.1a kernels of this stack are built with CUDA 13
# Public reports from GB10 call 0.85-0.87 the safe range, because the system uses the same memory.
SAFE_UTILIZATION = 0.87
DISK_FAIL, DISK_WARN = 2 * GIB, 10 * GIB  # our own bounds: torch.compile, Triton and FlashInfer caches
SHM_WARN = GIB  # Docker's default is 64 MiB
NO_GPU = "nvidia-smi   # if it fails here, start the container with --gpus all"
SAFER = "--gpu-memory-utilization 0.85"
COUNTED = 0.5  # share of the test's allocation; other processes in the container change the count by less
LARGER = "SPARKFORGE_MEMORY=8g docker compose up -d   # or no --memory"
FREE_MEMORY = "sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'   # first stop other programs"

CHECKS = CheckList[View]()


@CHECKS.add(needs=("os",), fix="python -m validate --profile embedded   # the profile for other machines")
def _architecture(view: View) -> CheckResult:
    """The processor is aarch64, as in every DGX Spark."""
    machine = view.text("os.machine")
    return judged(machine == "aarch64", f"this machine is {machine}, DGX Spark is aarch64")


@CHECKS.add(needs=("os", "cpu"), fix="grep -m1 -E 'flags|Features' /proc/cpuinfo")
def _cpu_instructions(view: View) -> CheckResult:
    """The processor has the instructions vLLM's CPU build is compiled for."""
    machine, flags = view.text("os.machine"), set(view.names("cpu.flags"))
    wanted, better = {"x86_64": ("avx2", "avx512f"), "aarch64": ("asimd", "bf16")}.get(machine, ("", ""))
    if not wanted:
        return failed(f"vLLM's CPU build is made for x86_64 and aarch64, this machine is {machine}")
    if wanted not in flags:
        return failed(f"this {machine} processor has no {wanted}")
    if better not in flags:
        evidence = f"it has {wanted}, but not {better}: the server is slow"
        return warned(evidence, f"./inv up   # a processor with {better} is faster")
    return passed(f"{machine} with {wanted} and {better}")


@CHECKS.add(needs=("gpu",), fix=NO_GPU)
def _gpu_name(view: View) -> CheckResult:
    """nvidia-smi names one GB10."""
    name, count = view.text("gpu.name"), view.number("gpu.count")
    if "GB10" not in name.replace("-", " ").split():
        return failed(f"the GPU is {name}, this profile is for GB10", "python -m validate --profile embedded")
    return judged(count == 1, f"{count:g} x {name}", "CUDA_VISIBLE_DEVICES=0   # a Spark has one GPU")


@CHECKS.add(needs=("gpu", "cuda"), fix=NO_GPU)
def _gpu_capability(view: View) -> CheckResult:
    """Compute capability is 12.1, by nvidia-smi and by CUDA itself."""
    smi, cuda = view.text("gpu.compute_capability"), view.text("cuda.compute_capability")
    if smi != cuda:
        return failed(f"nvidia-smi says {smi}, CUDA says {cuda}", "sudo reboot   # driver and libraries differ")
    return judged(cuda == "12.1", f"compute capability {cuda}, wanted 12.1")


@CHECKS.add(needs=("gpu", "cuda"), fix="./inv up --device embedded")
def _gpu_supported(view: View) -> CheckResult:
    """nvidia-smi and CUDA name the same compute capability, and there are kernels for it."""
    smi, cuda = view.text("gpu.compute_capability"), view.text("cuda.compute_capability")
    if smi != cuda:
        return failed(f"nvidia-smi says {smi}, CUDA says {cuda}", "sudo reboot   # driver and libraries differ")
    known = capabilities.load()
    if cuda not in known:
        return failed(f"{view.text('gpu.name')} has {cuda}; there are kernels for {', '.join(known)}")
    return passed(f"{view.text('gpu.name')}, {cuda}: {known[cuda].experts} ({known[cuda].shown})")


@CHECKS.add(
    needs=("gpu", "serve", "model"),
    fix="nvidia-smi   # shows which processes hold it; end them, or lower --gpu-memory-utilization",
)
def _gpu_memory(view: View) -> CheckResult:
    """The GPU's free memory covers vLLM's share, and the share covers the weights."""
    total, free = view.number("gpu.memory_total_mib") * 2**20, view.number("gpu.memory_free_mib") * 2**20
    share, weights = view.number("serve.gpu_memory_utilization"), view.number("model.weight_bytes")
    wanted, needed = share * total, weights + devices.table()["spark"].runtime.value * GIB
    evidence = f"{gib(free)} of {gib(total)} free, vLLM takes {gib(wanted)}, {gib(needed)} needed"
    if wanted < needed:
        evidence = f"{evidence} (weights {gib(weights)})"
        return failed(evidence, "./inv up -- --gpu-memory-utilization 0.95   # or a larger GPU")
    return judged(free >= wanted, evidence)


@CHECKS.add(
    needs=("memory", "model", "numerics"),
    fix="SPARKFORGE_MEMORY=110g ./inv up   # and report this: docs/hardware.md says that no driver does this",
)
def _cuda_memory_uncounted(view: View) -> CheckResult:
    """The container's memory limit does not count CUDA's allocations."""
    limit, weights = headroom(view), view.number("model.weight_bytes")
    if view.is_none("numerics.charged") or limit is None:
        return passed("there is no limit, or no GPU to allocate on")
    share = view.number("numerics.charged")
    evidence = f"of 512 MiB of CUDA memory the container's limit counts {share:.0%}"
    if share > COUNTED and limit < weights:
        return failed(f"{evidence}; it leaves {gib(limit)}, and the weights are {gib(weights)}")
    return passed(evidence)


@CHECKS.add(needs=("gpu", "numerics"), fix="nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,PERFORMANCE")
def _gpu_clock(view: View) -> CheckResult:
    """The GPU's clock is not lowered by heat, power or a limit that somebody set."""
    now = GpuState.read(view.table("gpu.state"))
    loaded = None if view.is_none("numerics.loaded") else GpuState.read(view.table("numerics.loaded"))
    for state in (loaded, now):
        if state is not None and (fault := state.fault())[0]:
            return warned(*fault)
    described = now.describe() or "nvidia-smi has no figures"
    return passed(f"{described}; under load: {loaded.describe() if loaded else 'not measured'}")


@CHECKS.add(needs=("gpu",), fix="sudo apt update && sudo apt full-upgrade && sudo reboot")
def _driver_version(view: View) -> CheckResult:
    """The driver is of branch 580 or later; 590 gives a warning."""
    major, driver = view.version("gpu.driver_version").major, view.text("gpu.driver_version")
    if major in RISKY_DRIVERS:
        evidence = f"driver {driver}: CUDA graphs are reported to hang on GB10 with the 590 branch"
        return warned(evidence, "--enforce-eager   # if the server hangs; no hangs are reported for the 580 branch")
    return judged(major >= capabilities.MIN_DRIVER, f"driver {driver}, wanted {capabilities.MIN_DRIVER} or later")


@CHECKS.add(needs=("cuda",), fix="./inv up   # installs the locked set again")
def _cuda_version(view: View) -> CheckResult:
    """CUDA is 13.0 or later, in the driver and in the runtime."""
    driver, runtime = view.version("cuda.driver_api"), view.version("cuda.runtime_version")
    evidence = f"driver API {view.text('cuda.driver_api')}, runtime {view.text('cuda.runtime_version')}"
    if driver < MIN_CUDA:
        return failed(f"{evidence}: the driver must know CUDA 13.0", "sudo apt update && sudo apt full-upgrade")
    if runtime < MIN_CUDA:
        return failed(f"{evidence}: the runtime must be 13.0 or later")
    return judged(driver.major >= runtime.major, f"{evidence}; the driver must not be a major version behind")


def headroom(view: View) -> float | None:
    """Return the bytes that the container's limit leaves; None if no limit is below the machine's memory."""
    name = "memory.cgroup_headroom_bytes"
    return None if view.is_none(name) else view.number(name)


def reserve(view: View, total: float) -> float:
    """Return the bytes of `total` below which the memory guard ends the server."""
    return thresholds.load().moved_to(view.number("memory.guard_gib")).end_below(int(total))


def stop_others(view: View) -> str:
    """Return a fix that names the largest visible process."""
    if view.is_none("memory.largest_process"):
        return FREE_MEMORY
    return FREE_MEMORY.replace("other programs", f"other programs (the largest: {view.text('memory.largest_process')})")


@CHECKS.add(needs=("memory", "model", "serve"), fix=FREE_MEMORY)
def _memory_unified(view: View) -> CheckResult:
    """Available unified memory covers the weights, vLLM's share, its host memory and a reserve."""
    share, total = view.number("serve.gpu_memory_utilization"), view.number("memory.total_bytes")
    # Swap does not count: CUDA's memory cannot be swapped out.
    free, weights, limit = view.number("memory.available_bytes"), view.number("model.weight_bytes"), headroom(view)
    spark = devices.table()["spark"]
    host, reserved = spark.host.value * GIB, reserve(view, total)
    if not 0 < share <= 1:
        return failed(f"--gpu-memory-utilization {share:g} is not above 0 and at most 1", SAFER)
    if limit is not None and limit < host:  # the limit does not count CUDA's allocations
        return failed(f"the container's limit leaves {gib(limit)}, and vLLM's host side needs {gib(host)}", LARGER)
    # vLLM does not start if free < ceil(total * share): vllm/v1/worker/utils.py, request_memory.
    # At its start, vLLM's share must cover the plan's lines for one sequence of the greatest length.
    model = serving.architecture(view)
    load = serving.load(view, model)
    wanted, needed = share * total, sum(line.bytes for line in share_lines(model, spark, load, int(weights)))
    parts = f"{gib(weights)} of weights and {gib(needed - weights)} for one sequence of --max-model-len and work space"
    beside = f"{gib(host)} for vLLM's host side, {gib(reserved)} below which the memory guard ends it"
    swap = view.number("memory.swap_free_bytes")
    free_text = f"{gib(free)} free" + (f" ({gib(swap)} of swap not counted)" if swap else "")
    smaller = f"{int(100 * max(0.0, free - host - reserved) / total) / 100:.2f}"
    refused = None
    if free < needed + host + reserved:
        sizes = {"memory": total, "resident": total - free, "host": host + reserved}
        figures = {name: getattr(spark, name).model_copy(update={"value": size / GIB}) for name, size in sizes.items()}
        tokens = most_tokens(model, spark.model_copy(update=figures), load)
        shorter = f"; or --max-model-len {tokens} --gpu-memory-utilization {smaller}" if tokens else ""
        evidence = f"{free_text}, {gib(needed + host + reserved)} needed: {parts}; {beside}"
        refused = failed(evidence, stop_others(view) + shorter)
    elif wanted < needed:
        evidence = f"{share:g} of {gib(total)} is {gib(wanted)}, {gib(needed)} are needed: {parts}"
        refused = failed(evidence, "raise --gpu-memory-utilization, or lower --max-model-len: ./inv plan shows both")
    elif free < wanted + host + reserved:
        # The needed memory is free, so a smaller share, with a smaller KV cache, would work.
        use = f"{gib(wanted)} by vLLM ({share:g} of {gib(total)}), {beside}"
        evidence = f"{free_text}, and {gib(wanted + host + reserved)} may be taken: {use}"
        refused = failed(evidence, f"{stop_others(view)}; or --gpu-memory-utilization {smaller}")
    if refused:
        return refused
    evidence = f"{free_text} of {gib(total)}; vLLM may take {gib(wanted)}, weights {gib(weights)}; {beside}"
    if share > SAFE_UTILIZATION:
        remainder = f"that leaves the system {gib(total - wanted)}, and vLLM can exceed its share (vLLM issue 46307)"
        return warned(f"{evidence}: {remainder}", SAFER)
    return passed(evidence)


@CHECKS.add(needs=("memory", "model"), fix=FREE_MEMORY)
def _memory_host(view: View) -> CheckResult:
    """Free memory covers the weights, the server and a reserve."""
    free, weights, limit = view.number("memory.available_bytes"), view.number("model.weight_bytes"), headroom(view)
    reserved = reserve(view, view.number("memory.total_bytes"))
    if limit is not None and limit - reserve(view, limit) < free - reserved:
        free, reserved = limit, reserve(view, limit)
    needed = weights + HOST_WORKING_BYTES + reserved
    evidence = f"{gib(free)} free, {gib(needed)} needed (weights {gib(weights)}, {gib(reserved)} for the memory guard)"
    return judged(free >= needed, evidence, stop_others(view))


@CHECKS.add(needs=("os",), fix='sudo loginctl enable-linger "$USER"   # or RemoveIPC=no in /etc/systemd/logind.conf')
def _remove_ipc(view: View) -> CheckResult:
    """The end of a login does not delete the server's shared memory."""
    removed = view.flag("os.remove_ipc")
    deleted = "systemd deletes this user's /dev/shm when the last session ends, and a start meanwhile fails"
    return judged(not removed, deleted if removed else "nothing deletes this user's /dev/shm at a logout")


@CHECKS.add(needs=("disk",), fix="VLLM_CACHE_ROOT=/a/larger/disk ./inv up   # or free some space")
def _disk_space(view: View) -> CheckResult:
    """The disk with vLLM's caches has enough free space."""
    free, folder = view.number("disk.cache_free_bytes"), view.text("disk.cache_directory")
    evidence = f"{gib(free)} free for {folder}"
    return failed(evidence) if free < DISK_FAIL else warned(evidence) if free < DISK_WARN else passed(evidence)


@CHECKS.add(needs=("shm",), fix="docker compose up -d   # in docker run: --shm-size=1g")
def _shared_memory(view: View) -> CheckResult:
    """The shared memory in /dev/shm is not Docker's 64 MiB."""
    total = view.number("shm.total_bytes")
    return judged(total >= SHM_WARN, f"{gib(total)} in /dev/shm, {gib(SHM_WARN)} advised")


@CHECKS.add(needs=("serve",), fix="./inv up --port 8001")
def _port_free(view: View) -> CheckResult:
    """The server's port can be bound."""
    port = view.number("serve.port")
    free = view.flag("serve.port_free")
    fix = f"ss -ltnp 'sport = :{port:g}'   # shows the process; stop it, or choose another --port"
    return judged(free, f"port {port:g} is {'free' if free else 'taken'}", fix)
