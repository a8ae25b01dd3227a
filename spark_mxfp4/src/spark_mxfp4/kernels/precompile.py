"""Compile the CUDA kernels before they are needed: `python -m spark_mxfp4.kernels.precompile 90a 121a`.

The shared libraries are in `compiled/`, next to the sources; a missing library is compiled into the user's cache at
first use. Libraries need only a driver, not torch or CUDA's runtime library. A library's name contains a hash of its
sources and flags, so a library of other sources is never loaded. `SPARK_MXFP4_PRECOMPILE=90a,121a uv build --wheel
spark_mxfp4` adds the libraries to the wheel. This module imports only the standard library, because a build has no
torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
COMPILED = FOLDER / "compiled"
LINEAR, HOPPER, LAYER, ROUTER, STEP = "linear", "hopper", "layer", "router", "step"
# Target → the libraries that its GPUs use: HOPPER has the experts' kernels for any number of tokens, LAYER for few.
# LIMITED are 12.1's kernels built for 9.0, for measurements; SPARK_PACE can throttle their memory to a GB10's speed.
LIMITED = "90a-limited"
LIBRARIES = {
    "90a": (HOPPER, LINEAR, ROUTER, STEP),
    "120a": (LINEAR, ROUTER, STEP),
    "121a": (LAYER, LINEAR, ROUTER, STEP),
    LIMITED: (LAYER,),
}


class Shape(NamedTuple):
    """A kernel's tile and ring of stages: a line of shapes.cuh, which explains the numbers."""

    rows: int
    split: int
    step: int
    tokens: int
    stages: int
    blocks: int
    registers: int = 0

    @property
    def chunks(self) -> int:
        """Chunks of 64 columns in a stage."""
        return self.split * self.step

    @property
    def weight_bytes(self) -> int:
        """Bytes of a stage's weights; 64 x 64 weights with their scales take 2,176 bytes."""
        return self.rows * self.chunks * 2176

    @property
    def gathers(self) -> bool:
        """Whether the first product reads activations from the tokens' rows, not from planes."""
        return self.tokens <= 48


def shapes(table: str) -> dict[int, Shape]:
    """Return the shapes of a table of shapes.cuh by number; `table` is GROUPED, SMALL_LAYERS or LARGE_LAYERS."""
    text = (FOLDER / "shapes.cuh").read_text(encoding="utf-8")
    [lines] = re.findall(rf"#define SPARK_{table}\(SHAPE\)((?:.*\\\n)*.*)", text)
    rows = (map(int, row.split(",")) for row in re.findall(r"SHAPE\((.*)\)", lines))
    return {number: Shape(*numbers) for number, *numbers in rows}


def flags(target: str) -> tuple[str, ...]:
    """Return nvcc's flags for `target`, such as "90a"."""
    small = ("-DSPARK_SMALL",) if target.startswith("12") or target == LIMITED else ()  # see layer.cu
    paced = (f"-DSPARK_PACE={pace}",) if target == LIMITED and (pace := os.environ.get("SPARK_PACE")) else ()
    architecture = target.partition("-")[0]
    return ("-O3", "-std=c++17", f"-gencode=arch=compute_{architecture},code=sm_{architecture}", *small, *paced)


def units(name: str) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the translation units of a library: the source and extra flags of each."""
    files = {HOPPER: ("moe", "layer", "grouped"), LAYER: ("moe", "layer")}.get(name, (name,))
    kernels = shapes("GROUPED") if name == HOPPER else ()
    return [
        *((FOLDER / f"{file}.cu", ()) for file in files),
        *((FOLDER / "grouped.cu", (f"-DSPARK_NUMBER={number}",)) for number in kernels),
    ]


def file_name(name: str, target: str) -> str:
    """Return the file name of a library: its name, target, machine, and 12 digits of the hash of its inputs."""
    digest = hashlib.sha256(" ".join(flags(target)).encode())
    for path in [*dict.fromkeys(path for path, _ in units(name)), *sorted(FOLDER.glob("*.cuh"))]:
        digest.update(b"\0" + path.read_bytes())
    machine = sysconfig.get_platform().rpartition("-")[2]  # of the target machine if setuptools cross-compiles
    return f"{name}-{target}-{machine}-{digest.hexdigest()[:12]}.so"


def library(name: str, target: str) -> Path | None:
    """Return the library compiled from the current sources; None if there is none."""
    paths = (folder / file_name(name, target) for folder in (COMPILED, cache()))
    return next((path for path in paths if path.is_file()), None)


def cache() -> Path:
    """Return the folder for libraries that are compiled at first use."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark-mxfp4" / "compiled"


def nvcc() -> str:
    """Return CUDA's compiler: CUDA_HOME's, else the one on PATH or in /usr/local/cuda. Raises FileNotFoundError."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [f"{home}/bin"] if home else [*os.get_exec_path(), "/usr/local/cuda/bin"]
    program = shutil.which("nvcc", path=os.pathsep.join(folders))
    if program is None:
        scope = f"in {home}/bin" if home else "on PATH"
        raise FileNotFoundError(
            f"the kernels cannot be compiled · there is no nvcc {scope} · install CUDA 13's compiler and set CUDA_HOME"
        )
    return program


def compile_target(target: str, folder: Path | None = None, jobs: int = 0) -> list[Path]:
    """Compile the missing libraries of `target` and return the paths of all.

    `folder` defaults to the folder that libraries are loaded from. `jobs` compilers run at once, by default one a core.
    Raises ValueError for an unknown target, FileNotFoundError without nvcc, and RuntimeError with the compiler's last
    lines.
    """
    if target not in LIBRARIES:
        raise ValueError(f"there are no kernels for {target!r} · targets are {', '.join(LIBRARIES)} · name one of them")
    return [build(name, target, folder or COMPILED, jobs) for name in LIBRARIES[target]]


def build(name: str, target: str, folder: Path, jobs: int = 0) -> Path:
    """Compile a library's units in parallel and link them in `folder`, unless it exists; return its path.

    The library appears only when complete; of several processes only one compiles it. Raises as `compile_target` does.
    """
    output = folder / file_name(name, target)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.is_file():
            _link(units(name), target, output, jobs or os.cpu_count() or 1)
    finally:
        os.close(lock)
    return output


def _link(sources: list[tuple[Path, tuple[str, ...]]], target: str, output: Path, jobs: int) -> None:
    compiler = nvcc()
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        objects = [Path(name) / str(number) / f"{file.stem}.o" for number, (file, _) in enumerate(sources)]

        def compile_unit(source: tuple[Path, tuple[str, ...]], result: Path) -> None:
            """Compile one translation unit, position-independent."""
            # Symbols contain the names of intermediate files, so these names must not contain a process id. nvcc names
            # the files after the source. Several units have the same source, so each unit has its own folder.
            result.parent.mkdir()
            options = ["--objdir-as-tempdir", "-Xcompiler", "-fPIC", "-c", str(source[0]), "-o", str(result)]
            _run([compiler, *flags(target), *source[1], *options])

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(compile_unit, sources, objects))
        linked = Path(name) / output.name
        # CUDA's runtime is linked statically, so that the library works with a torch of any CUDA version.
        _run([compiler, *flags(target), "-shared", "-cudart", "static", *map(str, objects), "-o", str(linked)])
        linked.replace(output)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last = " ".join((result.stderr or result.stdout).split()[-60:])
        raise RuntimeError(f"{' '.join(command[:1])} ended with {result.returncode} · {last} · {' '.join(command)}")


def main(arguments: list[str]) -> int:
    """Compile the targets of the command line and print the files; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spark_mxfp4.kernels.precompile", description=__doc__)
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=", ".join(LIBRARIES))
    parser.add_argument("--output", type=Path, help="folder; default: where libraries are loaded from")
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
