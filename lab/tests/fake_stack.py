"""A made-up stack: vLLM and FlashInfer 1.0 as sdists in the cache, a queue each, a kernel set and two profiles.

The made-up vLLM can be run: its selector and parser have the names of the real ones, and its `torch.py` replaces torch.
"""

import json
from types import SimpleNamespace

import pytest

from lab.patches import upstream
from lab.upstream.check import StackCheck
from lab.upstream.releases import candidates
from sparkforge.compile.flashinfer.sets import KernelTable
from sparkforge.pins import Pins
from sparkforge.serve.profiles import ServeProfile

ORACLE = "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py"
EXPERTS = "vllm/model_executor/layers/fused_moe/experts/cutlass.py"
VLLM = {
    "torch.py": 'bfloat16 = "bfloat16"\n',
    "vllm/__init__.py": '__version__ = "1.0"\n',
    "vllm/envs.py": 'import os\nenvironment_variables: dict = {\n    "VLLM_PLUGINS": lambda: 1,\n    "VLLM_CUBIN": 1,\n'
    '    "VLLM_NO_USAGE_STATS": 1,\n}\n',
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
    "vllm/utils/deep_gemm.py": "import functools\n\n\n@functools.cache\ndef is_deep_gemm_supported(): ...\n",
    "vllm/utils/flashinfer.py": "def _wrap(module, name): ...\n\n\n"
    'flashinfer_moe = _wrap("flashinfer.fused_moe", "cutlass_fused_moe")\n'
    "def has_flashinfer():\n    return False\n",
    "vllm/platforms/__init__.py": "class Platform:\n    _enum = None\n\n\ncurrent_platform = Platform()\n",
    "vllm/platforms/interface.py": "from collections import namedtuple\nfrom enum import Enum\n\n"
    'DeviceCapability = namedtuple("DeviceCapability", "major minor")\n\n\nclass PlatformEnum(Enum):\n    CUDA = 1\n',
    "vllm/engine/arg_utils.py": "def add_cli_args(parser):\n"
    '    parser.add_argument("--moe-backend", choices=["auto", "x"])\n'
    '    parser.add_argument("--max-num-seqs", type=int)\n    return parser\n',
    "vllm/entrypoints/common/cli_args.py": "from vllm.engine.arg_utils import add_cli_args\n\n\n"
    "class BaseFrontendArgs:\n    tool_call_parser: str = ''\n\n\n"
    "class FrontendArgs(BaseFrontendArgs):\n    port: int = 1\n\n\n"
    'def make_arg_parser(parser):\n    parser.add_argument("--model")\n    parser.add_argument("--tool-call-parser")\n'
    "    return add_cli_args(parser)\n",
    "vllm/model_executor/layers/fused_moe/activation.py": "from enum import Enum\n\n\n"
    "class MoEActivation(Enum):\n    SWIGLUOAI = 1\n",
    "vllm/model_executor/layers/fused_moe/config.py": "from enum import Enum\nfrom types import SimpleNamespace\n\n\n"
    "class RoutingMethodType(Enum):\n    Renormalize = 1\n\n\nclass FusedMoEParallelConfig:\n    @staticmethod\n"
    "    def make_no_parallel():\n        return None\n\n\nFusedMoEConfig = SimpleNamespace\n",
    ORACLE: "import logging\nfrom enum import Enum\n\nfrom vllm.platforms import current_platform\n\n"
    "CHOICE = 'MARLIN'\nlogger = logging.getLogger()\n\n\nclass Backend(Enum):\n    MARLIN = 'MARLIN'\n"
    "    FP4 = 'FLASHINFER_CUTLASS_MXFP4_MXFP8'\n\n\ndef select_mxfp4_moe_backend(config):\n"
    "    assert current_platform.get_device_capability() == (12, 1)\n    return Backend(CHOICE), None\n",
    EXPERTS: "from vllm.utils.flashinfer import flashinfer_moe\n\n\ndef apply(x, scale):\n"
    "    return flashinfer_moe(input=x, scale=scale)\n",
    "vllm/model_executor/layers/quantization/utils/quant_utils.py": "",
    "vllm/sample.py": "import flashinfer\n\n\ndef sample(x):\n    from flashinfer import interleave as inter\n\n"
    "    return flashinfer.sampling.top_k(x, inter(x), 1)\n",
    "requirements/cuda.txt": "# ours\n-r common.txt\ntorch==9.0\nflashinfer-python==1.0 # a comment\nnumpy>=2\n",
    "CMakeLists.txt": "include(FetchContent)\nFetchContent_Declare(\n  cutlass\n"
    "  GIT_REPOSITORY https://example.org/cutlass.git\n  GIT_TAG v1\n)\n",
}
FLASHINFER = {
    "flashinfer/__init__.py": "from . import sampling\nfrom .fused_moe import interleave as interleave\n",
    "flashinfer/fused_moe/__init__.py": "try:\n    from .core import cutlass_fused_moe\nexcept ImportError:\n"
    "    cutlass_fused_moe = None\nfrom .core import *\n",
    "flashinfer/fused_moe/core.py": "from typing import overload\n\n\n"
    "@overload\ndef cutlass_fused_moe(other): ...\n\n\n"
    "def cutlass_fused_moe(input, scale, *, tune=False):\n    pass\n\n\ndef interleave(x):\n    return x\n",
    "flashinfer/sampling.py": "def top_k(x, k, p, deterministic=True):\n    pass\n",
    "flashinfer/jit/moe.py": 'import os\n\nDECLARATION = ""\n\n\ndef gen_module(name, size, decl):\n'
    '    return os.environ["FLASHINFER_CUDA_ARCH_LIST"], os.environ["FLASHINFER_WORKSPACE_BASE"]\n',
    "flashinfer/jit/cpp.py": 'NAMES = "FLASHINFER_NVCC_LAUNCHER", "FLASHINFER_CXX_LAUNCHER"\n\n\njobs = None\n',
}
KERNELS = {
    "schema": 1,
    "flashinfer": "1.0",
    "environment": {"FLASHINFER_OURS": "1"},
    "server": {"VLLM_CUBIN": "1"},
    "sets": {"all": "everything"},
    "calls": {
        "experts": {"file": EXPERTS, "line": 5, "text": "return flashinfer_moe(", "why": "w"},
        "scales": {"file": "vllm/sample.py", "line": 5, "text": "from flashinfer import interleave", "why": "w"},
        "sampling": {"file": "vllm/sample.py", "line": 7, "text": "flashinfer.sampling.top_k(", "why": "w"},
    },
    "not_called": {},
    "module": [{
        "name": "moe", "sets": ["all"], "call": "experts", "generator": "flashinfer.jit.moe:gen_module", "audit": "a",
        "arguments": {"name": "n", "size": 3, "decl": "@flashinfer.jit.moe:DECLARATION"},
    }],
}  # fmt: skip
PROFILES = {
    "a": {"flags": {"--moe-backend": {"value": "x", "why": "w"}, "--tool-call-parser": {"value": "y", "why": "w"}}},
    "b": {
        "flags": {"--max-num-seqs": {"value": 3, "why": "w"}},
        "environment": {"VLLM_CUBIN": {"value": "1", "why": "w"}, "OTHERS": {"value": "1", "why": "w"}},
    },
}
QUEUES = {
    "vllm": (ORACLE, "CHOICE = 'MARLIN'", "CHOICE = 'FLASHINFER_CUTLASS_MXFP4_MXFP8'"),
    "flashinfer": ("flashinfer/jit/cpp.py", "jobs = None", 'jobs = "FLASHINFER_OURS"'),
}
PACKAGES = {"vllm": "vllm", "flashinfer": "flashinfer-python"}
FILES = {"vllm": VLLM, "flashinfer": FLASHINFER}


@pytest.fixture
def world(tmp_path, monkeypatch, kit):
    """`check(upstream, {path: text or None})` adds a release that differs from 1.0, and checks it."""
    patches, components = tmp_path / "patches", {}

    def release(name, version, change=()):
        top = f"{PACKAGES[name].replace('-', '_')}-{version}"
        data = kit.sdist(top, {**FILES[name], **dict(change)})
        return {f"{top}.tar.gz": {"sha256": kit.seed(f"{top}.tar.gz", data), "size": len(data)}}

    for name, (path, old, new) in QUEUES.items():
        text = FILES[name][path]
        diff = kit.diff(tmp_path / name, {path: text}, {path: text.replace(old, new)})
        header = kit.HEADER.replace("pkg/a.py nothing of the kind", f"{path} NOTHING OF THE KIND")
        kit.write_queue(patches / f"{name}-1.0", diff, header=header)
        components[name] = {"version": "1.0", "kind": "sdist", "package": PACKAGES[name], "licence": "MIT",
                            "why": "test", "patches": f"{name}-1.0", "files": release(name, "1.0")}  # fmt: skip
    cutlass = {
        "of": "vllm", "asked_in": "CMakeLists.txt", "dependency": "cutlass",
        "repository": "https://example.org/cutlass.git", "tag": "v1", "commit": "unknown", "tree": "unknown",
        "size": "unknown", "licence": "MIT", "needed": True, "why": "test",
    }  # fmt: skip
    image = {"device": "cuda", "locks": {"aarch64": "a"}, "kernels": "all"}
    stack = {"summary": "test", "components": components, "git": {"cutlass": cutlass}, "image": image}
    environments = {"s": {"lock": "embedded", "size": 1}}
    table = Pins.model_validate({"schema": 1, "default": "s", "stacks": {"s": stack}, "environments": environments})
    kernels = KernelTable.model_validate(json.loads(json.dumps(KERNELS)))
    profiles = {name: ServeProfile.model_validate(profile) for name, profile in PROFILES.items()}
    setting = SimpleNamespace(table=table, patches=patches, kernels=kernels, profiles=profiles, python=None,
                              files=FILES, oracle=ORACLE, experts=EXPERTS)  # fmt: skip

    def check(name, change=(), version="1.1"):
        release(name, version, change)
        (candidate,) = candidates(table, "s", [f"{name}-{version}"], patches)
        assert not candidate.release.pinned
        stack = StackCheck(table, "s", patches, kernels, profiles, setting.python, "no code is run")
        with stack.folders:
            return stack.run(candidate)

    monkeypatch.setattr(upstream, "client", lambda: pytest.fail("the network is not asked"))
    setting.release, setting.check = release, check
    return setting
