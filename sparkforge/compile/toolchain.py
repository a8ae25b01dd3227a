"""The CUDA toolchain: this machine's, or installed from hash-locked wheels (`locks/toolchain.in`).

The wheels put everything under `nvidia/cu13`. That folder becomes a CUDA_HOME with three additions: `lib64`, the
unversioned names that `-lcudart` needs, and a `libcuda.so` to link against without a driver.

To compile for another machine, that machine's wheels are installed in the same way, with this machine's programs.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from sparkforge.audit.cubins import Tools
from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.errors import CompileError, on
from sparkforge.core.files import require_space, sha256_file
from sparkforge.core.manifest import Made
from sparkforge.core.process import run, run_unchecked
from sparkforge.pins import locks

THIS_MACHINE = os.uname().machine
LAYOUT = "1"  # increase it when this module makes a different folder from the same wheels
SPACE = 1_400_000_000  # bytes: 1.2 GB installed, measured on x86-64
HOME = "nvidia/cu13"
# The first CUDA release with each architecture. The release notes of CUDA 12.9 add 12.1 and the suffix `f`.
SINCE = {"12.0": (12, 8), "12.0a": (12, 8), "12.0f": (12, 9), "12.1": (12, 9), "12.1a": (12, 9), "12.1f": (12, 9)}
# The files that FlashInfer's and vLLM's units include and link against; a runtime-only CUDA lacks some.
PARTS = (
    "bin/nvcc", "bin/ptxas", "bin/cudafe++", "bin/fatbinary", "nvvm/bin/cicc", "nvvm/libdevice/libdevice.10.bc",
    "include/cuda_runtime.h", "include/cuda_fp4.h", "include/cublasLt.h", "include/curand_kernel.h", "include/nvrtc.h",
    "lib64/libcudart.so", "lib64/libnvrtc.so", "lib64/libcublasLt.so", "lib64/stubs/libcuda.so",
)  # fmt: skip
CXX_NAMES = ("c++", "g++", "g++-15", "g++-14", "g++-13", "g++-12", "g++-11")
MINIMUM_CXX = 9  # the first GCC whose library has all of C++17, which FlashInfer's units need; vLLM requires 13
# ccache 4.7.5 cannot cache nvcc with --generate-dependencies-with-compile, 4.14.2 can: docs/concepts/compiling.md.
MINIMUM_CCACHE = (4, 14)


LAUNCHERS = ("FLASHINFER_NVCC_LAUNCHER", "FLASHINFER_CXX_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER",
             "CMAKE_CXX_COMPILER_LAUNCHER")  # fmt: skip


@dataclass(frozen=True)
class Toolchain:
    """Absolute paths of a build's programs for `machine` (`uname -m`); versions of nvcc, c++, glibc, ninja, ccache."""

    home: Path  # CUDA_HOME
    origin: str  # "CUDA_HOME", "PATH" or "locked wheels"
    cxx: Path
    ninja: Path
    ccache: Path
    versions: Mapping[str, str]
    machine: str = THIS_MACHINE

    @property
    def nvcc(self) -> Path:
        """The CUDA compiler driver."""
        return self.home / "bin/nvcc"

    def environment(self) -> dict[str, str]:
        """Return the variables that make FlashInfer's JIT, CMake and torch use exactly these programs, with ccache."""
        folders = [self.home / "bin", self.ninja.parent]
        return {
            "CUDA_HOME": str(self.home),
            "PATH": os.pathsep.join([*dict.fromkeys(map(str, folders)), os.environ.get("PATH", os.defpath)]),
            "TMPDIR": tempfile.gettempdir(),  # with an empty TMPDIR nvcc writes into / and loses its files
            **dict.fromkeys(("CXX", "NVCC_CCBIN", "CUDAHOSTCXX"), str(self.cxx)),
            # No flags of the user, and no process id in the names of intermediate files: symbols include these names.
            "NVCC_PREPEND_FLAGS": "",
            "NVCC_APPEND_FLAGS": "--objdir-as-tempdir",
            "CCACHE_NAMESPACE": self.machine,  # ccache's hash does not include NVCC_CCBIN
            "CCACHE_DIR": os.environ.get("CCACHE_DIR") or str(paths.cache() / "ccache"),
            **dict.fromkeys(LAUNCHERS, str(self.ccache)),
        }


def find(architecture: str = "12.1a", *, minimum_cxx: int = MINIMUM_CXX, machine: str = THIS_MACHINE) -> Toolchain:
    """Return programs that can build for `architecture` on `machine`; install the locked ones if none here fits.

    A CUDA_HOME or CXX that is set is used or refused, never ignored. Raises CompileError, and the errors of `install`.
    """
    home, origin = _home(architecture, machine)
    cxx, cxx_version = host_compiler(home, minimum_cxx, machine)
    ninja, ccache = helper("ninja"), helper("ccache")
    versions = {"nvcc": nvcc_version(home / "bin/nvcc"), "c++": cxx_version, "glibc": glibc_version(cxx)}
    versions |= {path.name: ".".join(map(str, _version(path))) for path in (ninja, ccache)}
    return Toolchain(home, origin, cxx, ninja, ccache, versions, machine)


def _home(architecture: str, machine: str) -> tuple[Path, str]:
    foreign = f"its libraries are not {machine}'s" if machine != THIS_MACHINE else ""
    if chosen := os.environ.get("CUDA_HOME"):
        if reason := foreign or unfit(Path(chosen), architecture):
            failure = f"cannot build with CUDA_HOME={chosen}"
            raise _error(failure, reason, "unset CUDA_HOME   # the locked compiler is used")
        return Path(chosen).absolute(), "CUDA_HOME"
    if not foreign and (nvcc := shutil.which("nvcc")) and (home := home_of(Path(nvcc))):
        if not (reason := unfit(home, architecture)):
            return home, "PATH"
        say(f"{nvcc} is skipped: {reason}")
    home = install(machine)[0] / HOME
    if reason := unfit(home, architecture):
        failure = f"{home} is no longer complete"
        raise _error(failure, reason, on("rm -r", home.parent.parent, "then the same command again"))
    return home, "locked wheels"


def home_of(nvcc: Path) -> Path | None:
    """Return an nvcc's CUDA_HOME, or None, from TOP in its dry run: the nvcc may be a wrapper in another folder."""
    dry_run = run_unchecked([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull])
    match = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, re.MULTILINE)
    return Path(match[1].strip()).resolve() if match else None


def unfit(home: Path, architecture: str) -> str:
    """Return why the CUDA in `home` cannot build for `architecture`; empty if it can. Raises CompileError."""
    if architecture not in SINCE:
        known = ", ".join(SINCE)
        failure = f"no rule for compute capability {architecture}"
        raise _error(failure, f"choose from {known}", "--help   # name one of them")
    if missing := [part for part in PARTS if not (home / part).exists()]:
        return f"{home} lacks {', '.join(missing)}"
    version, needed = nvcc_version(home / "bin/nvcc"), SINCE[architecture]
    if tuple(map(int, version.split(".")[:2])) < needed:
        return f"its nvcc {version} does not know {architecture}, which came with {needed[0]}.{needed[1]}"
    return ""


def nvcc_version(nvcc: Path) -> str:
    """Return an nvcc's version, such as 13.0.88. Raises CompileError if it does not print one."""
    match = re.search(r"\bV(\d+\.\d+\.\d+)\b", run_unchecked([nvcc, "--version"]).stdout)
    if match is None:
        raise _error(f"cannot use {nvcc}", "it does not print its version", f"{nvcc} --version")
    return match[1]


def host_compiler(home: Path, minimum: int = MINIMUM_CXX, machine: str = THIS_MACHINE) -> tuple[Path, str]:
    """Return the first GCC for `machine` of version `minimum` or later that `home`'s nvcc supports, and its version.

    For another machine it is a cross compiler with that machine's name as prefix, as Debian names them. nvcc's header
    sets the upper bound. Raises CompileError.
    """
    header = home / "include/crt/host_config.h"
    limit = re.search(r"^#if __GNUC__ > (\d+)$", header.read_text(encoding="utf-8"), re.MULTILINE)
    maximum = int(limit[1]) if limit else minimum
    chosen, rejected = os.environ.get("CXX"), []
    prefix = "" if machine == THIS_MACHINE else f"{machine}-linux-gnu-"
    for name in [chosen] if chosen else [prefix + name for name in CXX_NAMES]:
        if not (path := shutil.which(name)):
            continue
        is_clang = "clang" in run_unchecked([path, "--version"]).stdout
        match = re.match(r"\d+(\.\d+)*", run_unchecked([path, "-dumpfullversion"]).stdout)
        version = match[0] if match and not is_clang else ""
        target = run_unchecked([path, "-dumpmachine"]).stdout.partition("-")[0]
        if version and minimum <= int(version.split(".")[0]) <= maximum and (target == machine or not prefix):
            return Path(path).absolute(), version
        rejected.append(f"{name} {version or 'is not GCC'}" + (f" for {target}" if prefix else ""))
    which = f"GCC {minimum} to {maximum}" + (f" for {machine}" if prefix else "")
    why = f"nvcc takes {which} here, and there is {', '.join(rejected) or chosen or 'none'}"
    package = f"g++-{machine.replace('_', '-')}-linux-gnu" if prefix else f"g++-{min(maximum, max(minimum, 13))}"
    fix = f"sudo apt install {package}" + ("; unset CXX" if chosen else "")
    raise _error("no host compiler that fits", why, f"{fix}   # then the same command again")


def glibc_version(cxx: Path) -> str:
    """Return the version of the C library for which a compiler builds."""
    command: list[str | Path] = [cxx, "-E", "-P", "-include", "features.h", "-x", "c++", "-"]
    return ".".join(run_unchecked(command, stdin="__GLIBC__ __GLIBC_MINOR__").stdout.split()[-2:])


def helper(name: str) -> Path:
    """Return ninja, or a ccache that can cache nvcc's units: this machine's if it fits, else the locked one."""
    minimum = MINIMUM_CCACHE if name == "ccache" else (1,)
    path = shutil.which(name)
    if path and _version(Path(path)) >= minimum:
        return Path(path).absolute()
    return install()[0] / "bin" / name


def _version(program: Path) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", run_unchecked([program, "--version"]).stdout)
    return tuple(int(number) for number in match.groups() if number) if match else ()


def program(name: str) -> Path:
    """Return one of CUDA's programs, such as nvdisasm: CUDA_HOME's, else PATH's, else the locked one.

    Each program is looked up separately, because a CUDA often lacks cuobjdump and nvdisasm. Raises CompileError, and
    the errors of `install`.
    """
    cuda_home = os.environ.get("CUDA_HOME")
    for folders in (f"{cuda_home}/bin" if cuda_home else "", os.environ.get("PATH", os.defpath)):
        if program_path := shutil.which(name, path=folders):
            return Path(program_path).absolute()
    path = install()[0] / HOME / "bin" / name
    if not path.is_file():
        raise _error(f"there is no {name}", "it is neither on this machine nor in the locked wheels", "check its name")
    return path


def audit_tools() -> Tools:
    """Return the programs with which the audit reads machine code. Raises the errors of `program`."""
    return Tools(program("cuobjdump"), program("nvdisasm"))


def install(machine: str = THIS_MACHINE) -> tuple[Path, bool]:
    """Install the locked toolchain for code of `machine`; return its folder and whether it was installed now.

    CUDA_HOME is the folder's `nvidia/cu13`. Raises NetworkError, StorageError, and CompileError if there is no host
    compiler for the stub.
    """
    folder = paths.state() / "toolchain" / f"cuda-{machine}"
    inputs = {"lock": sha256_file(locks.lock_path("toolchain")), "machine": machine, "layout": LAYOUT}
    if not manifest.current(folder, "toolchain", inputs):
        require_space(folder, SPACE, "the CUDA toolchain")
    programs = None if machine == THIS_MACHINE else install()[0]
    return folder, manifest.once(folder, "toolchain", inputs, lambda path: _make(path, machine, programs))[1]


def _make(folder: Path, machine: str, programs: Path | None) -> Made:
    """Install the wheels; `programs` is a folder with programs that run here, if those of the wheels do not."""
    locks.install(Path(sys.executable), "toolchain", target=folder, machine=machine)
    home = folder / HOME
    if programs:
        for part in ("bin", f"{HOME}/bin", f"{HOME}/nvvm/bin"):
            shutil.rmtree(folder / part)
            shutil.copytree(programs / part, folder / part)  # not linked: nvcc finds CUDA relative to its own path
        (home / "targets").mkdir()
        (home / "targets" / f"{machine}-linux").symlink_to("..")  # where nvcc looks for another machine's files
    add_links(home)
    cxx, version = host_compiler(home, machine=machine)
    make_stub(home, cxx)
    # A wheel's RECORD holds the hash of each of its files.
    packages = {path.name.removesuffix(".dist-info"): path for path in sorted(folder.glob("*.dist-info"))}
    records = {name: sha256_file(path / "RECORD") for name, path in packages.items() if (path / "RECORD").is_file()}
    parts = (name.rpartition("-") for name in packages)
    return Made(records, {"c++": version, **{canonicalize_name(name): number for name, _, number in parts}})


def add_links(home: Path) -> None:
    """Add `lib64` and, beside every libX.so.N, the name libX.so."""
    (home / "lib64").symlink_to("lib")
    for library in sorted((home / "lib").glob("lib*.so.*")):
        plain = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)


def make_stub(home: Path, cxx: Path) -> None:
    """Make `lib/stubs/libcuda.so`: an empty function for each name in cuda.h, with the driver's SONAME libcuda.so.1.

    The functions are needed because Ubuntu's linker drops a library that resolves nothing (--as-needed), and a module
    that does not name libcuda.so.1 cannot be loaded.
    """
    source = run([cxx, "-E", "-x", "c++", f"-I{home / 'include'}", home / "include/cuda.h"]).stdout
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\s*\()", source)))
    code = "".join(f'extern "C" void {name}() {{}}\n' for name in names)
    output = home / "lib/stubs/libcuda.so"
    output.parent.mkdir(exist_ok=True)
    run([cxx, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c++", "-", "-o", output], stdin=code)


def print_toolchain(machine: str = THIS_MACHINE) -> None:
    """Say which toolchain a build for `machine` would use."""
    chain = find(machine=machine)
    say(f"CUDA of {chain.origin}: {chain.home}")
    for name, version in chain.versions.items():
        say(f"{name} {version}")


def _error(failure: str, why: str, fix: str) -> CompileError:
    return CompileError(failure, why, fix, code="compile.toolchain")
