"""The queue for vLLM 0.13.0 (stack ngc-25.12) on the real sdist.

0.13.0 cannot be imported with today's torch, so each patched function is extracted from its file and run separately.
Each helper names its stand-ins for the rest of vLLM; the code under test is upstream's text with our patch.
"""

import ast
import logging
import shutil
import tarfile
from collections.abc import Generator
from enum import Enum
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from sparkforge import pins
from sparkforge.core.paths import ROOT
from sparkforge.patching.series import Queue
from sparkforge.sources import fetch

pytestmark = [pytest.mark.integration, pytest.mark.nightly]  # another release

STACK = pins.load().stacks["ngc-25.12"]
QUEUE = Queue.load(ROOT / "patches" / "vllm-0.13.0")
PLATFORM = "vllm/platforms/interface.py"
MXFP4 = "vllm/model_executor/layers/quantization/mxfp4.py"
WEIGHTS = "vllm/model_executor/model_loader/weight_utils.py"
DECORATORS = "vllm/compilation/decorators.py"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The files that the queue changes, from the sdist, whose hash is checked."""
    component = STACK.components["vllm"]
    sdist = fetch.fetch_pinned(component, *component.files)
    tree = tmp_path_factory.mktemp("pristine")
    with tarfile.open(sdist) as tar:
        for path in QUEUE.paths:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(tar.extractfile(f"vllm-0.13.0/{path}").read())
    return tree


@pytest.fixture(scope="module")
def patched(pristine, tmp_path_factory):
    tree = tmp_path_factory.mktemp("patched") / "tree"
    shutil.copytree(pristine, tree)
    QUEUE.apply_to(tree)
    return tree


@pytest.fixture(params=["pristine", "patched"])
def tree(request):
    path = request.getfixturevalue(request.param)
    return SimpleNamespace(path=path, patched=request.param == "patched")


def cut(tree, path, *names, inside=None):
    """Return the definitions `names` of a module, or of the class `inside` it, as one syntax tree."""
    body = ast.parse((tree / path).read_text()).body
    if inside:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == inside)
    nodes = [node for node in body if getattr(node, "name", None) in names]
    return ast.Module(body=nodes, type_ignores=[])


def execute(code, names):
    exec(compile(ast.fix_missing_locations(code), "<cut>", "exec"), names)  # noqa: S102  upstream's own functions
    return names


class Capability(NamedTuple):
    """Replaces vLLM's DeviceCapability, with comparison with tuples and conversion to a number."""

    major: int
    minor: int

    def to_int(self):
        return self.major * 10 + self.minor


class Kind(Enum):
    CUDA = 1
    ROCM = 2


def platform(tree, capability, kind=Kind.CUDA):
    """Return vLLM's own capability checks for a made-up device."""
    checks = ("is_device_capability", "is_device_capability_family", "is_blackwell_class")
    names = execute(cut(tree, PLATFORM, *checks, inside="Platform"), {"PlatformEnum": Kind})
    device = type("Device", (), {name: names[name] for name in checks if name in names})
    device._enum = kind
    device.get_device_capability = classmethod(lambda cls, device_id=0: Capability(*capability) if capability else None)
    device.is_cuda = staticmethod(lambda: kind is Kind.CUDA)
    device.is_rocm = staticmethod(lambda: kind is Kind.ROCM)
    device.is_xpu = staticmethod(lambda: False)
    return device


def backend(tree, capability, kind=Kind.CUDA, *, flashinfer=True, asked=True, triton=False):
    """Run vLLM's own selection and return (name, warnings). Stand-ins: platform, packages, environment, logger."""
    warnings = []
    names = {
        "Enum": Enum, "current_platform": platform(tree, capability, kind),
        "has_flashinfer": lambda: flashinfer, "has_triton_kernels": lambda: triton,
        "is_torch_equal_or_newer": lambda version: True,
        "envs": SimpleNamespace(
            VLLM_USE_FLASHINFER_MOE_MXFP4_BF16=asked, VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=False,
            VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS=False, VLLM_MXFP4_USE_MARLIN=None,
        ),
        "logger": SimpleNamespace(info_once=lambda *_: None, warning_once=lambda text, *_: warnings.append(text)),
    }  # fmt: skip
    wanted = cut(tree, MXFP4, "Mxfp4Backend", "get_mxfp4_backend", "get_mxfp4_backend_with_lora")
    return execute(wanted, names)["get_mxfp4_backend"](with_lora_support=False).name, warnings


SELECTION = {  # case: (device, what is there, upstream's choice, ours)
    "spark, asked": ((12, 1), {}, "MARLIN", "SM90_FI_MXFP4_BF16"),
    "spark, not asked": ((12, 1), {"asked": False}, "MARLIN", "MARLIN"),
    "spark without flashinfer": ((12, 1), {"flashinfer": False}, "MARLIN", "MARLIN"),
    "rtx": ((12, 0), {}, "MARLIN", "MARLIN"),
    "hopper, asked": ((9, 0), {}, "SM90_FI_MXFP4_BF16", "SM90_FI_MXFP4_BF16"),
    "hopper, not asked": ((9, 0), {"asked": False, "triton": True}, "TRITON", "TRITON"),
    "b200": ((10, 0), {}, "SM100_FI_MXFP4_BF16", "SM100_FI_MXFP4_BF16"),
    "b300": ((10, 3), {}, "SM100_FI_MXFP4_BF16", "SM100_FI_MXFP4_BF16"),
    "thor": ((11, 0), {}, "MARLIN", "MARLIN"),
    "radeon": ((12, 0), {"kind": Kind.ROCM, "triton": True}, "TRITON", "TRITON"),
}


@pytest.mark.parametrize("case", SELECTION)
def test_mxfp4_routing(tree, case):
    capability, is_available, upstream, ours = SELECTION[case]
    assert backend(tree.path, capability, **is_available)[0] == (ours if tree.patched else upstream)


def device_of_second_node(tree, *, distributed):
    """Return the device of the weights on the second of two machines with one GPU each.

    Stand-ins: fastsafetensors and its loader (which only records its device), torch.distributed, vLLM's world group.
    """
    seen = []

    def loader(group, device, files, **_):
        seen.append(device)
        copied = SimpleNamespace(key_to_rank_lidx={}, close=lambda: None)
        return SimpleNamespace(copy_files_to_device=lambda: copied, close=lambda: None)

    rank = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    world = SimpleNamespace(is_initialized=lambda: distributed, group=SimpleNamespace(WORLD=rank))
    names = {
        "torch": SimpleNamespace(distributed=world, device=torch.device, Tensor=torch.Tensor), "_init_loader": loader,
        "SingleGroup": lambda: SimpleNamespace(rank=lambda: 0, size=lambda: 1),
        "get_world_group": lambda: SimpleNamespace(device=torch.device("cuda:0")), "tqdm": lambda files, **_: files,
        "enable_tqdm": lambda _: False, "_BAR_FORMAT": "", "Generator": Generator,
        "logger": logging.getLogger("vllm"),
    }  # fmt: skip
    iterate = execute(cut(tree, WEIGHTS, "fastsafetensors_weights_iterator"), names)["fastsafetensors_weights_iterator"]
    assert list(iterate(["model.safetensors"], use_tqdm_on_load=False)) == []
    return str(seen[0])


def test_weights_go_to_the_device_of_this_process(tree):
    assert device_of_second_node(tree.path, distributed=True) == ("cuda:0" if tree.patched else "cuda:1")
    assert device_of_second_node(tree.path, distributed=False) == "cuda:0"


def inductor_patches(tree, *, newer, has_option):
    """Run the statements of vLLM's decorator that fill `inductor_config_patches`. Stand-ins: torch and its version."""
    blocks = (getattr(node, "body", None) for node in ast.walk(ast.parse((tree / DECORATORS).read_text())))
    statements = next(
        block[index : index + 2] for block in blocks if isinstance(block, list) for index, node in enumerate(block)
        if isinstance(node, ast.Assign) and ast.unparse(node) == "inductor_config_patches = {}"
    )  # fmt: skip
    options = {"assume_32bit_indexing": False} if has_option else {}
    names = {
        "torch": SimpleNamespace(_inductor=SimpleNamespace(config=SimpleNamespace(**options))),
        "is_torch_equal_or_newer": lambda version: newer,
    }
    return execute(ast.Module(body=statements, type_ignores=[]), names)["inductor_config_patches"]


@pytest.mark.parametrize(("newer", "has_option"), [(True, True), (True, False), (False, False), (False, True)])
def test_option_is_set_only_where_torch_has_it(tree, newer, has_option):
    expected = {"assume_32bit_indexing": True} if newer and (has_option or not tree.patched) else {}
    assert inductor_patches(tree.path, newer=newer, has_option=has_option) == expected
