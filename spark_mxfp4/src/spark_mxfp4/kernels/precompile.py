"""Compile the CUDA kernels before they are needed: `python -m spark_mxfp4.kernels.precompile 90a 121a`.

The shared libraries lie beside the sources, in `compiled/`, and are loaded in place of a build at first use. They need
neither torch nor CUDA's runtime library, only a driver. A library's name has a hash of its sources and flags, so one of
other sources is never loaded. `SPARK_MXFP4_PRECOMPILE=90a,121a uv build --wheel spark_mxfp4` puts them into the wheel.
Only the standard library is imported here: a build has no torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
COMPILED = FOLDER / "compiled"
LINEAR, HOPPER, LAYER, ROUTER = "linear", "hopper", "layer", "router"
# Target → the libraries that its GPUs use: HOPPER has the experts' kernels for any number of tokens, LAYER for few.
# LIMITED are 12.1's kernels for 9.0, for measurements: behind a memory as fast as a GB10's where SPARK_PACE names it.
LIMITED = "90a-limited"
LIBRARIES = {
    "90a": (HOPPER, LINEAR, ROUTER), "120a": (LINEAR, ROUTER), "121a": (LAYER, LINEAR, ROUTER), LIMITED: (LAYER,),
}  # fmt: skip


def flags(target: str) -> tuple[str, ...]:
    """Return nvcc's flags for `target`, such as "90a"."""
    small = ("-DSPARK_SMALL",) if target.startswith("12") or target == LIMITED else ()  # see layer.cu
    paced = (f"-DSPARK_PACE={pace}",) if target == LIMITED and (pace := os.environ.get("SPARK_PACE")) else ()
    architecture = target.partition("-")[0]
    return ("-O3", "-std=c++17", f"-gencode=arch=compute_{architecture},code=sm_{architecture}", *small, *paced)


def sources(name: str) -> list[Path]:
    """Return the translation units of a library."""
    if name in (HOPPER, LAYER):
        grouped = [FOLDER / "grouped.cu", *sorted((FOLDER / "hopper_units").glob("*.cu"))]
        return [FOLDER / "moe.cu", FOLDER / "layer.cu", *(grouped if name == HOPPER else [])]
    return [FOLDER / f"{name}.cu"]


def file_name(name: str, target: str) -> str:
    """Return the file name of a library: its name, target and machine, and 12 digits of its inputs' hash."""
    digest = hashlib.sha256(" ".join(flags(target)).encode())
    for path in [*sources(name), *sorted(FOLDER.glob("*.cuh"))]:
        digest.update(b"\0" + path.read_bytes())
    machine = sysconfig.get_platform().rpartition("-")[2]  # another one's where setuptools builds for it
    return f"{name}-{target}-{machine}-{digest.hexdigest()[:12]}.so"


def library(name: str, target: str) -> Path | None:
    """Return the library that was compiled from these sources; None if there is none."""
    path = COMPILED / file_name(name, target)
    return path if path.is_file() else None


def nvcc() -> str:
    """Return CUDA's compiler: CUDA_HOME's, else the one on PATH. Raises FileNotFoundError."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    program = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    if program is None:
        scope = f"in {home}/bin" if home else "on PATH"
        raise FileNotFoundError(
            f"the kernels cannot be compiled · there is no nvcc {scope} · install CUDA 13's compiler and set CUDA_HOME"
        )
    return program


def compile_target(target: str, folder: Path | None = None, jobs: int = 0) -> list[Path]:
    """Compile the libraries of `target` and return their paths; those that are there stay.

    `folder` is by default where they are loaded from. `jobs` compilers run at once, by default one a core.
    Raises ValueError for an unknown target, FileNotFoundError without nvcc, and RuntimeError with the compiler's last
    lines.
    """
    if target not in LIBRARIES:
        raise ValueError(f"there are no kernels for {target!r} · targets are {', '.join(LIBRARIES)} · name one of them")
    folder = folder or COMPILED
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / file_name(name, target) for name in LIBRARIES[target]]
    for name, path in zip(LIBRARIES[target], paths, strict=True):
        if not path.is_file():
            _link(sources(name), target, path, jobs or os.cpu_count() or 1)
    return paths


def _link(units: list[Path], target: str, output: Path, jobs: int) -> None:
    """Compile `units` side by side and link them; the output is there whole or not at all."""
    compiler = nvcc()
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        work = Path(name)
        objects = [work / f"{unit.stem}.o" for unit in units]

        def compile_unit(unit: Path, result: Path) -> None:
            """One translation unit, position-independent."""
            _run([compiler, *flags(target), "-Xcompiler", "-fPIC", "-c", str(unit), "-o", str(result)])

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(compile_unit, units, objects))
        linked = work / output.name
        # CUDA's runtime is linked in, so that the library fits a torch of any CUDA.
        _run([compiler, *flags(target), "-shared", "-cudart", "static", *map(str, objects), "-o", str(linked)])
        linked.replace(output)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last = " ".join((result.stderr or result.stdout).split()[-60:])
        raise RuntimeError(f"{' '.join(command[:1])} ended with {result.returncode} · {last} · {' '.join(command)}")


def main(arguments: list[str]) -> int:
    """Compile what the command line names, and print the files; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spark_mxfp4.kernels.precompile", description=__doc__)
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=", ".join(LIBRARIES))
    parser.add_argument("--output", type=Path, help="folder; default: where they are loaded from")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once; default: one a core")
    options = parser.parse_args(arguments)
    try:
        for target in options.targets:
            for path in compile_target(target, options.output, options.jobs):
                print(path)
    except (ValueError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
