"""The toolchain without nvcc: scripts print the output of nvcc 13.0.88. The host compiler and its linker are real."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from expected import refused
from programs import write_files, write_program

from sparkforge.compile import toolchain
from sparkforge.core import manifest
from sparkforge.core.files import write_json
from sparkforge.pins import locks

pytestmark = pytest.mark.needs("c++")
HERE = toolchain.THIS_MACHINE
OTHER = "x86_64" if HERE == "aarch64" else "aarch64"
VERSION = "Cuda compilation tools, release {short}, V{version}\nBuild cuda_13.0.r13.0/compiler.36424714_0"
HEADER = "#if defined(__GNUC__)\n\n#if __GNUC__ > {newest}\n\n#error -- unsupported GNU version!\n#endif\n"


def recorded_cuda(home, version="13.0.88", newest=15):
    """A CUDA_HOME whose nvcc prints recorded output, and whose other parts are empty files."""
    write_files(home, {**dict.fromkeys(toolchain.PARTS, ""), "include/crt/host_config.h": HEADER.format(newest=newest)})
    text = VERSION.format(short=version.rpartition(".")[0], version=version)
    dry = f"echo '#$ _HERE_={home}/bin' >&2; echo '#$ TOP={home}/bin/..' >&2"
    write_program(home / "bin/nvcc", f"case $1 in --version) echo '{text}';; --dryrun) {dry};; esac")
    return home


def wheels_like(folder, machine):
    home = folder / toolchain.HOME
    recorded_cuda(home)
    write_program(folder / "bin/ninja", "")
    programs = ("bin/ninja", f"{toolchain.HOME}/bin/ptxas", f"{toolchain.HOME}/nvvm/bin/cicc")
    write_files(folder, dict.fromkeys(programs, f"a program for {machine}"))
    shutil.rmtree(home / "lib64")
    libraries = ("libcudart.so.13", "libnvrtc.so.13", "libcublasLt.so.13", "libnvrtc-builtins.alt.so.13.0")
    write_files(home / "lib", dict.fromkeys(libraries, ""))
    declared = "".join(f"int {name}(int);\n" for name in ("cuInit", "cuMemAlloc_v2"))
    text = f"#define cuMemAlloc cuMemAlloc_v2\n{declared}typedef int (*cuCallback)(int);\n"
    write_files(home / "include", {"cuda.h": text, "cuda_runtime.h": f"of the wheel for {machine}"})
    write_files(folder, {"nvidia_cuda_nvcc-13.0.88.dist-info/RECORD": "bin/nvcc,sha256=0,1\n"})


@pytest.fixture
def installing(monkeypatch):
    """An installation that writes the wheels' layout; returns the list of installations."""

    def install(_python, name, target, machine):
        calls.append(name)
        wheels_like(target, machine)

    calls = []
    monkeypatch.setattr(locks, "install", install)
    return calls


@pytest.fixture
def machine(tmp_path, monkeypatch, installing):
    """A PATH with this machine's GCC, a ninja and a good ccache, and no CUDA."""
    folder = tmp_path / "path"
    write_program(folder / "ninja", "echo 1.13.2.git.kitware.jobserver-pipe-1")
    write_program(folder / "ccache", "echo ccache version 4.14.2")
    for name in ("c++", "as", "ld", "sh"):
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return folder


def test_cuda_home_is_used_and_reaches_every_build(machine, tmp_path, monkeypatch):
    home = recorded_cuda(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    chain = toolchain.find()
    assert (chain.home, chain.origin, chain.nvcc) == (home, "CUDA_HOME", home / "bin/nvcc")
    assert chain.versions["nvcc"] == "13.0.88"
    assert chain.versions["ccache"] == "4.14.2"
    assert int(chain.versions["c++"].split(".")[0]) >= toolchain.MINIMUM_CXX
    env = chain.environment()
    assert env["PATH"].split(os.pathsep)[:2] == [str(home / "bin"), str(machine)]
    assert (env["NVCC_PREPEND_FLAGS"], env["NVCC_APPEND_FLAGS"]) == ("", "--objdir-as-tempdir")  # not the user's flags
    assert env["NVCC_CCBIN"] == env["CXX"] == env["CUDAHOSTCXX"] == str(machine / "c++")
    assert env["FLASHINFER_NVCC_LAUNCHER"] == env["CMAKE_CUDA_COMPILER_LAUNCHER"] == str(machine / "ccache")


@pytest.mark.parametrize("setting", ["", "/nonexistent"])
def test_compilers_get_a_folder_for_temporary_files_that_is_there(machine, tmp_path, monkeypatch, setting):
    """nvcc uses TMPDIR unchecked: if empty, it writes to / and then reports a missing file."""
    monkeypatch.setenv("CUDA_HOME", str(recorded_cuda(tmp_path / "cuda")))
    monkeypatch.setenv("TMPDIR", setting)
    monkeypatch.setattr(tempfile, "tempdir", None)
    path = Path(toolchain.find().environment()["TMPDIR"])
    assert path.is_absolute()
    assert path.is_dir()


def test_an_incomplete_cuda_is_refused_if_requested(machine, tmp_path, monkeypatch):
    home = recorded_cuda(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    for part in ("include/curand_kernel.h", "nvvm/bin/cicc", "lib64/stubs/libcuda.so"):
        (home / part).unlink()
        with refused("compile.toolchain", f"lacks {part} .*unset CUDA_HOME"):
            toolchain.find()
        (home / part).touch()


def test_a_wrapper_leads_to_its_cuda_and_an_incomplete_one_is_skipped(machine, tmp_path, monkeypatch, capfd):
    home = recorded_cuda(tmp_path / "cuda")
    write_program(machine / "nvcc", f'exec {home}/bin/nvcc "$@"')
    assert (toolchain.find().home, toolchain.find().origin) == (home, "PATH")
    (home / "include/nvrtc.h").unlink()
    chain = toolchain.find()
    assert chain.origin == "locked wheels"
    assert "is skipped" in capfd.readouterr().err
    (chain.home / "bin/ptxas").unlink()
    with refused("compile.toolchain", f"no longer complete .*lacks bin/ptxas · rm -r {toolchain.install()[0]} "):
        toolchain.find()


def test_the_compiler_must_know_the_architecture(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(recorded_cuda(tmp_path / "12.9", "12.9.86")))
    assert toolchain.find("12.1a").versions["nvcc"] == "12.9.86"
    with refused("compile.toolchain", r"no rule for compute capability 9\.9"):
        toolchain.find("9.9")
    monkeypatch.setenv("CUDA_HOME", str(recorded_cuda(tmp_path / "12.8", "12.8.93")))
    for architecture in ("12.1a", "12.0f"):
        with refused("compile.toolchain", f"nvcc 12.8.93 does not know {architecture}, which came with 12.9"):
            toolchain.find(architecture)


def test_the_host_compiler_must_be_one_that_nvcc_and_the_build_take(machine, tmp_path, monkeypatch):
    home = recorded_cuda(tmp_path / "cuda", newest=6)
    with refused("compile.toolchain", r"nvcc takes GCC 5 to 6 here, and there is c\+\+ \d+"):
        toolchain.host_compiler(home, 5)
    home = recorded_cuda(tmp_path / "cuda2", newest=99)
    with refused("compile.toolchain", r"GCC 98 to 99 .*apt install g\+\+-98"):
        toolchain.host_compiler(home, 98)
    write_program(machine / "clang++", "echo Debian clang version 14.0.6")
    monkeypatch.setenv("CXX", "clang++")
    with refused("compile.toolchain", r"clang\+\+ is not GCC .*unset CXX"):
        toolchain.host_compiler(home)
    monkeypatch.setenv("CXX", "none-such")
    with refused("compile.toolchain", "there is none-such"):
        toolchain.host_compiler(home)


def test_a_newer_compiler_beside_an_old_default_is_found(machine, tmp_path):
    (machine / "c++").unlink()
    program = "case $1 in --version) echo 'g++ (GCC)';; *) echo {}.2.0;; esac"
    write_program(machine / "c++", program.format(8))
    write_program(machine / "g++-14", program.format(14))
    assert toolchain.host_compiler(recorded_cuda(tmp_path / "cuda")) == (machine / "g++-14", "14.2.0")


def test_a_ccache_that_cannot_cache_these_units_is_not_taken(machine):
    write_program(machine / "ccache", "echo ccache version 4.7.5")
    assert toolchain.helper("ccache") == toolchain.install()[0] / "bin/ccache"
    assert toolchain.helper("ninja") == machine / "ninja"


def test_programs_are_looked_for_one_by_one(machine, tmp_path, monkeypatch):
    home = recorded_cuda(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    (home / "bin/ptxas").chmod(0o755)
    write_program(machine / "cuobjdump", "")
    assert toolchain.program("ptxas") == home / "bin/ptxas"
    assert toolchain.program("cuobjdump") == machine / "cuobjdump"
    with refused("compile.toolchain", "there is no nvdisasm"):
        toolchain.program("nvdisasm")
    reader = write_program(toolchain.install()[0] / toolchain.HOME / "bin/nvdisasm", "")
    assert toolchain.program("nvdisasm") == reader


def test_the_locked_wheels_become_a_whole_cuda_home_once(installing):
    folder, is_new = toolchain.install()
    home = folder / toolchain.HOME
    assert is_new
    assert toolchain.unfit(home, "12.1a") == ""
    assert (home / "lib64/libnvrtc.so").resolve().name == "libnvrtc.so.13"
    assert (home / "lib64/libnvrtc-builtins.alt.so").resolve().name == "libnvrtc-builtins.alt.so.13.0"
    assert toolchain.install() == (folder, False)
    assert installing == ["toolchain"]
    record = json.loads(manifest.beside(folder).read_text())
    write_json(manifest.beside(folder), {**record, "inputs": {**record["inputs"], "lock": "another"}})
    assert toolchain.install() == (folder, True)


def test_an_incomplete_cuda_home_is_not_used(installing, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")  # for the stub, the last step
    with refused("compile.toolchain"):
        toolchain.install()
    monkeypatch.delenv("CXX")
    home, is_new = toolchain.install()
    assert is_new
    entries = sorted(path.name for path in home.parent.iterdir() if not path.name.endswith(".lock"))
    assert entries == [home.name, f"{home.name}.manifest.json"]


@pytest.mark.needs("readelf")
def test_programs_linked_with_the_stub_need_the_drivers_library(installing, tmp_path):
    home = toolchain.install()[0] / toolchain.HOME
    (tmp_path / "m.cc").write_text('extern "C" int cuInit(int);\nint f() { return cuInit(0); }\n')
    # --as-needed is the default of Ubuntu's linker.
    flags = f"-shared -fPIC m.cc -Wl,--as-needed -L{home}/lib64/stubs -lcuda -o m.so"
    subprocess.run([shutil.which("c++"), *flags.split()], cwd=tmp_path, check=True)
    reader = [shutil.which("readelf"), "-d", tmp_path / "m.so"]
    output = subprocess.run(reader, check=True, capture_output=True, text=True).stdout
    assert "(NEEDED)             Shared library: [libcuda.so.1]" in output


@pytest.fixture
def cross_compiler(tmp_path, monkeypatch):
    """This machine's GCC under the name of a cross compiler; only its reported target is false."""
    folder, name = tmp_path / "cross", f"{OTHER}-linux-gnu"
    text = f'case $1 in -dumpmachine) echo {name};; *) exec {shutil.which("c++")} "$@";; esac'
    program = write_program(folder / f"{name}-g++", text)
    write_program(folder / "ninja", "echo 1.13.2")
    write_program(folder / "ccache", "echo ccache version 4.14.2")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return program


def test_for_another_machine_its_libraries_get_programs_that_run_here(installing, cross_compiler, monkeypatch):
    chain = toolchain.find(machine=OTHER)
    folder = chain.home.parent.parent
    for program in ("bin/ninja", f"{toolchain.HOME}/bin/ptxas", f"{toolchain.HOME}/nvvm/bin/cicc"):
        assert (folder / program).read_text() == f"a program for {HERE}"
    header = chain.home / "targets" / f"{OTHER}-linux" / "include/cuda_runtime.h"  # where nvcc looks for it
    assert header.read_text() == f"of the wheel for {OTHER}"
    assert (chain.machine, chain.cxx, chain.origin) == (OTHER, cross_compiler, "locked wheels")
    assert toolchain.install()[0] != folder
    assert chain.environment()["CCACHE_NAMESPACE"] == OTHER, "ccache cannot tell two host compilers of one nvcc apart"
    monkeypatch.setenv("CUDA_HOME", str(toolchain.install()[0] / toolchain.HOME))
    with refused("compile.toolchain", f"its libraries are not {OTHER}'s"):
        toolchain.find(machine=OTHER)


def test_a_compiler_for_this_machine_is_refused_for_another_and_the_c_library_is_the_compilers(
    installing, cross_compiler, monkeypatch
):
    wanted = os.confstr("CS_GNU_LIBC_VERSION").split()[-1]
    assert toolchain.glibc_version(cross_compiler) == wanted
    monkeypatch.setenv("CXX", shutil.which("c++"))
    package = f"g..-{OTHER.replace('_', '-')}-linux-gnu"
    with refused("compile.toolchain", rf"for {OTHER} here, and there is .* for {HERE} · sudo apt install {package}"):
        toolchain.find(machine=OTHER)
