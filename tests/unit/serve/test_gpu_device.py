"""The choice of the device, or why none can serve, from files, processors and a stand-in for nvidia-smi."""

import json
import os
import platform
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from programs import write_program

from sparkforge.compile.flashinfer import build
from sparkforge.core.errors import RefusalError, UsageError
from sparkforge.core.memory import cpus
from sparkforge.image.devices import CONTAINERS, EMBEDDED
from sparkforge.models import recipes
from sparkforge.plan import capabilities
from sparkforge.serve import entrypoint, profiles, settings
from sparkforge.serve.devices import choose, in_environment
from sparkforge.serve.devices.in_environment import Gpu
from sparkforge.serve.record import StartPlan
from validate.checks.arguments import missing_on_cpu
from validate.facts import gpu
from validate.facts.machine import cpu_flags
from validate.facts.target import Options, Target

H100 = "NVIDIA H100 80GB HBM3, 9.0, 580.159.04, 81559, 4, Disabled"
GB10 = "NVIDIA GB10, 12.1, 580.95.05, [N/A], [N/A], [N/A]"


@pytest.mark.parametrize(
    ("text", "visible", "named"),
    [
        ("", None, "no NVIDIA driver works"),
        (H100, "-1", "hides every GPU"),
        (H100, "GPU-0f", "finds no GPU for CUDA_VISIBLE_DEVICES=GPU-0f"),
        (H100.replace("580.159.04", "570.86.10"), None, "driver 570.86.10"),
        (H100.replace("9.0", "8.0"), None, "compute capability 8.0"),
        (H100.replace("Disabled", "Enabled"), None, "MIG"),
        (H100.replace("81559, 4", "81559, 60000"), None, "60,000 of 81,559 MiB"),
    ],
)
def test_a_gpu_that_cannot_serve_is_refused_before_an_environment_is_made(
    text, visible, named, fake_nvidia_smi, monkeypatch
):
    fake_nvidia_smi(text)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(RefusalError) as caught:
        Gpu(StartPlan("gpu"))
    assert named in caught.value.why
    assert caught.value.fix


def test_the_capability_chooses_profile_validator_and_command(fake_nvidia_smi, tmp_path):
    fake_nvidia_smi(H100)
    device = Gpu(StartPlan("gpu", flags=("--max-num-seqs=2",)), Path(sys.executable), tmp_path)
    launch = device.launch()
    assert (device.validator, launch.plan.device, launch.plan.profile) == ("gpu", "gpu", "hopper")
    assert "--quantization=spark-mxfp4" in launch.command
    assert "sparkforge.serve.forked_vllm" not in launch.command
    assert launch.command.index("--max-num-seqs=72") < launch.command.index("--max-num-seqs=2")
    fake_nvidia_smi(GB10)
    device = Gpu(StartPlan("gpu"), Path(sys.executable), tmp_path)
    assert (device.validator, device.launch().plan.profile) == ("spark", "safe")


@pytest.mark.parametrize("variables", [{}, {"SPARK_MXFP4_FAMILIES": "off"}])
@pytest.mark.parametrize(("device", "ours"), [(H100, "on"), (None, "on"), (GB10, None)], ids=["9.0", "cpu", "12.1"])
def test_mxfp4_experts_run_on_our_kernels_where_the_familys_row_says_so(
    fake_nvidia_smi, tmp_path, monkeypatch, device, ours, variables
):
    """A value that the user set wins, with and without a container."""
    monkeypatch.setenv("SPARKFORGE_PROFILE", "spark" if device else "embedded")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = {**recipes.load()["qwen3-30b-a3b-fp8"].config, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fake_nvidia_smi(device or "")
    kind = Gpu if device else in_environment.Embedded
    launch = kind(StartPlan("gpu", model=str(tmp_path)), Path(sys.executable)).launch()
    container = entrypoint.plan(settings.read(os.environ), entrypoint.ContainerArguments(str(tmp_path)))
    servers = (launch, container) if device != H100 else (launch,)  # an image has kernels for 12.1
    chosen = {{**os.environ, **server.environment}.get("SPARK_MXFP4_FAMILIES") for server in servers}
    assert chosen == {variables.get("SPARK_MXFP4_FAMILIES", ours)}


def test_on_12_x_flashinfers_modules_are_compiled_and_the_server_gets_their_variables(
    fake_nvidia_smi, tmp_path, monkeypatch, capsys
):
    fake_nvidia_smi(GB10)
    variables, requests = tmp_path / "kernels.env", []
    variables.write_text("FLASHINFER_CUDA_ARCH_LIST=12.1a\nFLASHINFER_WORKSPACE_BASE=/a=b\n")
    monkeypatch.setattr(build, "build_kernels", lambda request: (requests.append(request), (variables, True))[1])
    device = Gpu(StartPlan("gpu"), Path("/bin/true"))
    device.prepare()
    assert (requests[0].arch, requests[0].python) == ("12.1a", "/bin/true")
    assert device.launch().environment["FLASHINFER_WORKSPACE_BASE"] == "/a=b"
    assert "[2/5] kernels" in capsys.readouterr().err


def test_a_gpu_that_serves_another_model_takes_one_that_fits_beside_it(fake_nvidia_smi):
    fake_nvidia_smi(H100.replace("81559, 4", "81559, 40000"))
    assert Gpu(StartPlan("gpu", flags=("--gpu-memory-utilization=0.5",))).capability.profile == "hopper"
    with pytest.raises(RefusalError) as caught:
        Gpu(StartPlan("gpu", flags=("--gpu-memory-utilization", "0.6")))
    assert "40,000 of 81,559 MiB of NVIDIA H100 80GB HBM3 are in use, and 60% must be free" in caught.value.why


def test_of_two_gpus_the_chosen_one_counts(fake_nvidia_smi, monkeypatch):
    fake_nvidia_smi(f"{H100.replace('9.0', '8.0')}\n{H100}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert capabilities.find({**os.environ})[1].profile == "hopper"
    target = Target(Options(), "spark")
    facts = [reading.read(target) for reading in gpu.SMI_READINGS]
    assert facts == ["NVIDIA H100 80GB HBM3", "580.159.04", "9.0", 1]


def test_a_profile_a_stack_and_an_interpreter_that_cannot_serve_are_refused(fake_nvidia_smi, tmp_path):
    fake_nvidia_smi(H100)
    for option, value, message in (
        ("profile", "safe", "its profile is hopper"),
        ("python", str(tmp_path / "python"), "no such interpreter"),
        ("flags", ("--gpu-memory-utilization=half",), "cannot be 'half'"),
    ):
        with pytest.raises(UsageError, match=message):
            Gpu(StartPlan("gpu", **{option: value}))
    with pytest.raises(UsageError, match="cannot serve the stack spark-next"):
        _ = Gpu(StartPlan("gpu", stack="spark-next")).environment


@pytest.mark.parametrize(("mode", "verdict"), [("strict", ""), ("warn", "refuse: 1 failed"), ("off", "left out")])
def test_a_refused_validation_ends_the_start_unless_the_user_says_otherwise(
    mode, verdict, fake_nvidia_smi, monkeypatch, tmp_path, capsys
):
    fake_nvidia_smi(H100)
    monkeypatch.setenv("SPARKFORGE_VALIDATE", mode)
    script = "echo 'FAIL layers  lm_head differs'; echo 'refuse: 1 failed'; exit 30"
    device = Gpu(StartPlan("gpu"), write_program(tmp_path / "python", script), tmp_path)
    if mode == "strict":
        with pytest.raises(RefusalError, match="lm_head differs"):
            device.validate()
        with pytest.raises(RefusalError, match="is it a Python interpreter"):
            Gpu(StartPlan("gpu"), Path("/bin/true"), tmp_path).validate()
        return
    assert device.validate().startswith(verdict)
    device.remember(None)
    assert "not recorded as known good" in capsys.readouterr().err


def test_a_requested_device_is_used_and_unknown_names_are_refused():
    for name, container in (("embedded", False), ("gpu", False), ("docker", True), ("docker-cpu", True)):
        assert (choose.choose(name).device, name in CONTAINERS) == (name, container)
    with pytest.raises(UsageError, match="auto, embedded, gpu, docker, docker-cpu"):
        choose.choose("tpu")


def test_auto_takes_a_free_gpu_and_else_says_why_not_without_asking_an_engine(fake_nvidia_smi, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "nonsense")
    why = "no NVIDIA driver is loaded; vLLM's CPU build serves"
    assert choose.choose("auto", tmp_path) == choose.Choice("embedded", why)
    (tmp_path / choose.NVIDIA_DRIVER).mkdir(parents=True)
    fake_nvidia_smi(H100)
    assert choose.choose("auto", tmp_path, "x86_64").device == "gpu"
    fake_nvidia_smi(H100.replace("81559, 4", "81559, 60000"))
    choice = choose.choose("auto", tmp_path, "x86_64")
    assert (choice.device, "are in use" in choice.why) == ("embedded", True)


def test_auto_on_a_spark_is_docker_if_its_engine_has_the_gpu(tmp_path, fake_engine):
    for name, text in ((choose.NVIDIA_DRIVER, "NVRM version"), (choose.PRODUCT, "NVIDIA_DGX_Spark\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    choice = choose.choose("auto", tmp_path, "aarch64")
    assert (choice.device, "nvidia-ctk" in choice.why) == ("embedded", True)
    fake_engine.info["Runtimes"]["nvidia"] = {"path": "nvidia-container-runtime"}
    why = "this is {} and Docker 26.1.5+dfsg1 has the GPU by NVIDIA runtime"
    assert choose.choose("auto", tmp_path, "aarch64") == choose.Choice("docker", why.format("NVIDIA_DGX_Spark"))
    (tmp_path / choose.PRODUCT).unlink()
    assert choose.choose("auto", tmp_path, "aarch64").why == why.format("an aarch64 machine with an NVIDIA driver")


# name: architecture, flags, whether it serves an FP8 cache
PROCESSORS = {
    "AVX2": ("x86_64", "fpu sse4_2 avx avx2 fma", False),
    "AVX-512": ("x86_64", "fpu sse4_2 avx avx2 fma avx512f avx512bw avx512vl avx512_vnni", True),
    "arm64": ("aarch64", "fp asimd crc32 atomics", False),
    "arm64 with BF16": ("aarch64", "fp asimd crc32 atomics asimddp bf16 i8mm", False),
}


@pytest.mark.parametrize(("architecture", "flags", "fp8"), PROCESSORS.values(), ids=PROCESSORS)
def test_only_a_processor_with_avx512_serves_an_fp8_cache(architecture, flags, fp8):
    for profile, served in (("embedded", True), ("embedded-kv8", fp8)):
        arguments = profiles.named(profile).arguments()
        assert bool(missing_on_cpu(arguments, architecture, flags.split())) == (not served)


def test_a_profile_that_needs_more_than_the_processor_has_is_refused():
    missing = missing_on_cpu(("--kv-cache-dtype=fp8",), platform.machine(), cpu_flags(Target(Options(), "")))
    refusal = pytest.raises(UsageError, match=r"--profile embedded-kv8 cannot be served.*AVX-512 or AMX")
    with refusal if missing else nullcontext():
        in_environment.Embedded(StartPlan(EMBEDDED, profile="embedded-kv8"))


def test_the_engine_leaves_a_core_to_everything_else(monkeypatch):
    for given, threads in (("", str(max(1, cpus(Path("/")) - 1))), ("4", "4")):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert in_environment.Embedded(StartPlan(EMBEDDED)).variables()["OMP_NUM_THREADS"] == threads
