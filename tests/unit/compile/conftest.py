"""A kernel cache as FlashInfer 0.7.0.post1 lays it out, built by a real ninja from build.ninja files of its form."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest

# The form of flashinfer/jit/cpp_ext.py's generate_ninja_build_for_op, shortened; the C++ compiler stands for nvcc.
BUILD = """\
ninja_required_version = 1.3
name = {name}
cuda_home = /usr
cxx = c++
nvcc = c++ -x c++
cxx_launcher =
nvcc_launcher =

common_cflags = -DPy_LIMITED_API=0x03090000 $
    -I{include}
cflags = $common_cflags $
    -fPIC
post_cflags =
cuda_cflags = $common_cflags $
    -fPIC
ldflags = -shared $
    -L$cuda_home/lib

rule compile
  command = $cxx_launcher $cxx -MMD -MF $out.d $cflags -c $in -o $out $post_cflags
  depfile = $out.d
  deps = gcc

rule cuda_compile
  command = $nvcc_launcher $nvcc -MMD -MF $out.d $cuda_cflags -c $in -o $out
  depfile = $out.d
  deps = gcc

rule link
  command = $cxx $in $ldflags -o $out

build {folder}/{name}_kernel.cuda.o: cuda_compile {source}/{name}.cu
build {folder}/{name}_binding.o: compile {source}/{name}.cpp

build {folder}/{name}.so: link {folder}/{name}_kernel.cuda.o $
    {folder}/{name}_binding.o
default {folder}/{name}.so
"""
VERSION, ARCH = "0.7.0.post1", "121a"


def make_module(base, name, header, version=VERSION):
    include, source = base / "include", base / "csrc"
    for folder in (include, source):
        folder.mkdir(exist_ok=True)
    (include / header).write_text("inline int one() { return 1; }\n")
    (source / f"{name}.cu").write_text(f'#include "{header}"\nint {name}_kernel() {{ return one(); }}\n')
    (source / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return 2; }}\n')
    folder = base / ".cache/flashinfer" / version / ARCH / "cached_ops" / name
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text(BUILD.format(name=name, include=include, source=source, folder=folder))
    subprocess.run([shutil.which("ninja"), "-C", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Compile three modules once.

    Return their base folder (ninja's files contain its path), a copy of it, and the modules' folders by name.
    """
    base = tmp_path_factory.mktemp("compiled") / "base"
    base.mkdir()
    folders = {name: make_module(base, name, header) for name, header in
               (("page", "common.cuh"), ("rope", "common.cuh"), ("sampling", "sampling.cuh"))}  # fmt: skip
    return base, shutil.copytree(base, base.with_name("copy")), folders


@pytest.fixture
def cached(compiled, monkeypatch):
    """Three built modules, of which `page` and `rope` share a header, and FlashInfer's folder of locks."""
    base, copy, folders = compiled
    shutil.rmtree(base)
    shutil.copytree(copy, base)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(base))
    locks = folders["page"].parent / "tmp"
    locks.mkdir()
    return SimpleNamespace(base=base, root=base / ".cache/flashinfer", folders=folders, locks=locks, make=make_module)
