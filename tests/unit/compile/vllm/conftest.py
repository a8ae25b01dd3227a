"""A small vLLM: an sdist with the real layout and target names, C++ only, configured by a real CMake."""

import shutil
import sys
from pathlib import Path

import pytest
from programs import write_program

from sparkforge import pins
from sparkforge.compile.toolchain import Toolchain
from sparkforge.compile.vllm import sources as vllm_sources
from sparkforge.compile.vllm.build import ExtensionOrder, Interpreter
from sparkforge.patching import series
from sparkforge.pins import Pins

CMAKE = """\
cmake_minimum_required(VERSION 3.20)
project(vllm_extensions LANGUAGES CXX)
message(STATUS "CUDA supported target architectures: 12.0")
if(NOT EXISTS "$ENV{FLASH_KDA_SRC_DIR}/csrc/flash_kda.cpp" OR NOT EXISTS "$ENV{TRITON_KERNELS_SRC_DIR}")
  message(FATAL_ERROR "a repository that is left out has no stub")
endif()
file(WRITE csrc/generated.h "#define ANSWER 42\\n")  # as vLLM's generators do
foreach(name spinloop fs_io_C)
  add_library(${name} MODULE csrc/${name}.cpp)
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX .abi3.so INSTALL_RPATH "")
  install(TARGETS ${name} LIBRARY DESTINATION vllm COMPONENT ${name})
endforeach()
"""
UNIT = '#include "generated.h"\nextern "C" int PyInit_{name}() {{ return ANSWER; }}\n'


@pytest.fixture
def small(kit, tmp_path, use_pins, monkeypatch):
    """Pin the small vLLM with a queue of one patch, and the real pins' repositories; return the checkout's root."""
    files = {"CMakeLists.txt": CMAKE, "setup.py": "", "docs/page.md": "not copied\n", "cmake/utils.cmake": ""}
    files |= {f"csrc/{name}.cpp": UNIT.format(name=name) for name in ("spinloop", "fs_io_C")}
    real = pins.load()
    stack = real.stacks["spark"].model_dump(by_alias=True)
    stack["components"] = {"vllm": stack["components"]["vllm"], "torch": stack["components"]["torch"]}
    sha256 = kit.seed("vllm-0.32.0.tar.gz", kit.sdist("vllm-0.32.0", files))
    stack["components"]["vllm"]["files"] = {"vllm-0.32.0.tar.gz": {"sha256": sha256, "size": "unknown"}}
    table = Pins.model_validate({"schema": 1, "default": "spark", "stacks": {"spark": stack}})
    use_pins(table)
    unit = {"csrc/spinloop.cpp": files["csrc/spinloop.cpp"]}
    patched = {name: text.replace("ANSWER;", "ANSWER + 1;") for name, text in unit.items()}
    kit.write_queue(tmp_path / "root/patches/vllm-0.32.0", kit.diff(tmp_path / "diff", unit, patched))
    monkeypatch.setattr(series, "PATCHES", tmp_path / "root/patches")
    for name in [source.variable for source in vllm_sources.load_targets("0.32.0").repositories.values()]:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "root"


@pytest.fixture
def order(small, tmp_path, monkeypatch):
    """An order for the small vLLM: real CMake, ninja and compiler, and a launcher that replaces ccache."""
    launcher = write_program(tmp_path / "launcher", f'echo "$@" >> {tmp_path}/compiled\nexec "$@"')
    # The libraries have no GPU code, so CUDA's tools must not run; if one does, it fails.
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))
    for name in ("cuobjdump", "nvdisasm"):
        write_program(tmp_path / "no-cuda/bin" / name, "exit 1")
    table = vllm_sources.load_targets("0.32.0")
    versions = {"nvcc": "13.0.88", "c++": "12.2.0", "ninja": "1", "ccache": "none"}
    chain = Toolchain(tmp_path, "test", *(Path(shutil.which(name)) for name in ("c++", "ninja")), launcher, versions)
    torch = {"torch": "2.13.0", "built for python": "3", "cmake": "3"}
    interpreter = Interpreter(Path(sys.executable), Path(shutil.which("cmake")), torch)

    def make(*targets, **changes):
        sources = vllm_sources.fetch_sources(table, targets, None, "spark")
        values = {"limit": None, "output": tmp_path / "overlay", "arch": "12.1a"} | changes
        return ExtensionOrder(targets, chain=chain, interpreter=interpreter, sources=sources, table=table, **values)

    make.compiled = lambda: (tmp_path / "compiled").read_text().splitlines() if (tmp_path / "compiled").exists() else []
    make.forget = lambda: (tmp_path / "compiled").unlink(missing_ok=True)
    return make
