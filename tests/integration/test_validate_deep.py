"""The validator's deep facts from the real vLLM: as it is on this CPU, and when a platform plugin claims to be a 12.1.

The plugin keeps the CPU build's platform until vLLM has built its configuration (the CPU build cannot be imported as
CUDA), then answers "CUDA, 12.1"; a made-up FlashInfer has the names that vLLM looks for. Parser, configuration and
selector are vLLM's own.
"""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from forge import patch
from forge.tree import record_name, store_name
from serve import tiny
from sparkforge.paths import ROOT
from validate import Options, deep
from validate.scene import Scene

pytestmark = pytest.mark.integration
RECORD, STORE = record_name("vllm"), store_name("vllm")

FP4 = "FLASHINFER_CUTLASS_MXFP4_MXFP8"
FLAGS = ("--moe-backend", "flashinfer_cutlass", "--quantization-config.moe.activation", "mxfp8")
# What vllm/utils/flashinfer.py asks for in has_flashinfer_cutlass_fused_moe.
FLASHINFER = {
    "__init__": ("fp4_quantize", "nvfp4_block_scale_interleave"),
    "fused_moe": ("cutlass_fused_moe", "trtllm_fp4_block_scale_moe"),
}
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability, PlatformEnum

class ClaimedGB10(CpuPlatform):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(12, 1)

    @classmethod
    def check_and_update_config(cls, vllm_config):
        super().check_and_update_config(vllm_config)
        cls._enum = PlatformEnum.CUDA
        cls.device_name = cls.device_type = "cuda"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("model") / "tiny")


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """Two copies of the installed vLLM: as upstream ships it, and patched. forge never writes a file in place."""
    installed = Path(importlib.util.find_spec("vllm").origin).parent.parent
    made = {}
    for name in ("upstream", "patched"):
        tree = made[name] = tmp_path_factory.mktemp(name)
        shutil.copytree(installed / "vllm", tree / "vllm", copy_function=link_or_copy)
        if (installed / RECORD).exists():
            shutil.copy2(installed / RECORD, tree / RECORD)
            shutil.copytree(installed / STORE, tree / STORE)
        patch.reverse(tree)
    patch.apply(made["patched"], patch.Queue.load(ROOT / "patches" / "vllm-0.32.0"))
    return made


@pytest.fixture(scope="module")
def claim(tmp_path_factory):
    """A directory with the platform plugin, as a distribution."""
    directory = tmp_path_factory.mktemp("claim")
    info = directory / "claimed_gb10-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: claimed-gb10\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nclaimed_gb10 = claimed_gb10:register\n")
    (directory / "claimed_gb10.py").write_text("def register(): return 'claimed_gb10_platform.ClaimedGB10'\n")
    (directory / "claimed_gb10_platform.py").write_text(PLATFORM)
    (directory / "flashinfer").mkdir()
    for module, names in FLASHINFER.items():
        (directory / "flashinfer" / f"{module}.py").write_text("".join(f"def {name}(): ...\n" for name in names))
    return directory


def told(model, *path, args=()):
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    env |= {"PYTHONPATH": ":".join(map(str, path)), "OMP_NUM_THREADS": "1", "VLLM_HAS_FLASHINFER_CUBIN": "1"}
    options = Options(model=model, serve_args=("--dtype", "bfloat16", *args), environ=env)
    return deep.gather(Scene(options, "spark"))


def test_cpu_is_told_as_it_is(model, trees):
    # Named, because without it the plugin claims the checkpoint on a CPU without AMX and leaves it on one with AMX.
    facts = told(model, trees["upstream"], args=("--quantization", "spark-mxfp4"))
    assert facts["deep.platform"].value == "CpuPlatform"
    assert facts["deep.quantization"].value == "spark-mxfp4"
    assert facts["deep.attention_backend"].value == ["CPU_ATTN"]
    assert "the patch is not applied" in facts["deep.is_blackwell_class"].error


@pytest.mark.parametrize(
    ("tree", "args", "backend"),
    [
        ("upstream", (), "MARLIN"),
        ("upstream", FLAGS, FP4),
        ("patched", (), FP4),
        ("patched", ("--moe-backend", "marlin"), "MARLIN"),
    ],
)
def test_moe_backend_on_a_claimed_gb10(model, trees, claim, tree, args, backend):
    facts = told(model, trees[tree], claim, args=args)
    assert facts["deep.capability"].value == "12.1"
    assert facts["deep.moe_backend"].error is None
    assert facts["deep.moe_backend"].value == backend
    # Asked before the configuration stands, the plugin is still the CPU's platform: the method is there, and says no.
    assert facts["deep.is_blackwell_class"].value is (False if tree == "patched" else None)


def test_argument_that_vllm_does_not_know_is_an_unknown_fact(model, trees):
    facts = told(model, trees["upstream"], args=("--no-such-option",))
    assert facts["deep.moe_backend"].value is None
    assert facts["deep.moe_backend"].error.startswith("SystemExit")
