"""Unsuitable interpreters are refused with everything that they lack; fake programs replace the interpreters."""

import json
import os

import pytest
from expected import refused
from programs import write_program

from sparkforge.compile.vllm import build as vllm_env
from sparkforge.compile.vllm import sources as vllm_sources
from sparkforge.core.errors import UsageError

GOOD = {
    "python": "3.12.3", "header": True, "missing": [], "torch": "2.13.0+cu130", "cuda": "13.0", "place": "/x/torch",
}  # fmt: skip


@pytest.fixture
def interpreter(tmp_path):
    """Make a program that answers the probe with GOOD and the changes, with a CMake 4.1.2 in its folder."""

    def make(cmake="4.1.2", **changes):
        answer = json.dumps({**GOOD, "include": str(tmp_path), **changes})
        for name, text in (("python", f"cat <<'EOF'\n{answer}\nEOF"), ("cmake", f"echo cmake version {cmake}")):
            write_program(tmp_path / name, text)
        return tmp_path / "python"

    return make


def test_a_suitable_interpreter_is_used_with_the_cmake_in_its_folder(interpreter, tmp_path):
    examined = vllm_env.examine(interpreter(), "spark")
    assert examined.cmake == tmp_path / "cmake"
    assert examined.versions == {"torch": "2.13.0+cu130", "built for python": "3.12.3", "cmake": "4.1.2"}


def test_an_unsuitable_interpreter_is_refused_with_all_its_problems(interpreter):
    with refused("compile.inputs", r"instead of 2\.13\.0; .* without CUDA.*; it lacks jinja2, setuptools"):
        vllm_env.examine(interpreter(torch="2.11.0", cuda="", missing=["jinja2", "setuptools"]), "spark")
    with refused("compile.toolchain", r" · sudo apt install python3\.12-dev$"):
        vllm_env.examine(interpreter(header=False), "spark")
    python = interpreter()
    for text in ("exit 3", "echo Hello", "true"):
        write_program(python, text)
        with refused("compile.inputs", "cannot build with"):
            vllm_env.examine(python, "spark")


def test_an_old_cmake_is_skipped_and_named_if_there_is_no_other(interpreter, tmp_path, monkeypatch):
    python = interpreter(cmake="3.25.1")
    newer = tmp_path / "newer"
    write_program(newer / "cmake", "echo cmake version 3.28.3")
    monkeypatch.setenv("PATH", f"{newer}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert vllm_env.find_cmake(python) == (newer / "cmake", "3.28.3")
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("compile.toolchain", r"vLLM requires 3\.26\.1, and there is .*cmake is 3\.25\.1"):
        vllm_env.find_cmake(python)


TABLE = vllm_sources.load_targets("0.32.0")


def test_targets_and_architectures_are_those_of_sm121():
    with pytest.raises(UsageError, match=r"FlashAttention 3 is for 9.0a \(cmake/external_projects/vllm_flash_attn"):
        TABLE.chosen(["_vllm_fa3_C"])
    with pytest.raises(UsageError, match="vLLM has no target _C ·"):
        TABLE.chosen(["_C"])
    for arch, base in (("12.1a", "12.0"), ("12.1", "12.0"), ("12.0f", "12.0f")):
        assert (TABLE.mapped(arch).base, TABLE.mapped(arch).family) == (base, "12.0f")
    with pytest.raises(UsageError, match=r"no rule for --arch 10\.0a"):
        TABLE.mapped("10.0a")
