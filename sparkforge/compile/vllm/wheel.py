"""vLLM's wheel, compiled where the torch that it serves with is: for a stack whose torch is its base image's own.

    sdist ─► pip wheel, which runs vLLM's own CMake ─► the queue, by the same writer as upstream's wheels ─► lock

Upstream publishes no wheel for such a torch, so no hash of it can be locked beforehand. The wheel that is made here
goes into the lock of this very checkout, which in an image is the image's own: the validator compares what is installed
with it. No such image was built on a Spark.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sparkforge import pins
from sparkforge.compile.jobs import make_schedule, parse_limit
from sparkforge.compile.peaks import Peaks
from sparkforge.compile.vllm import sources as vllm_sources
from sparkforge.core import memory
from sparkforge.core.console import say
from sparkforge.core.errors import CompileError
from sparkforge.core.files import sha256_file, write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run
from sparkforge.patching import wheels
from sparkforge.patching.series import Queue
from sparkforge.pins.patched import load_patched, write_patched
from sparkforge.pins.table import PinnedFile, Stack
from sparkforge.sources import offline, trees

REVISION = 1  # of +sparkforge.N: a wheel that is compiled anew each time has no former one
HUNGRY = "vllm/any.cu.o"  # a unit of which nothing is known: MAX_JOBS is for CMake, which knows no units


def build_wheel(stack: str, python: Path, folder: Path, *, sources: str = "", jobs: str = "auto") -> Path:
    """Compile the stack's vLLM with `python`, which has torch, CUDA and pip; return the patched wheel in `folder`.

    `sources` is an unpacked bundle or has a checkout for each repository, empty: the network. The wheel's hashes go
    into locks/patched.toml. Raises CompileError for missing repositories and for a build that fails.
    """
    table = pins.load()
    component, image = table.component(stack, "vllm"), table.image(stack)
    (filename,) = [name for name in component.files if name.endswith(trees.ARCHIVE)]
    if sources and (Path(sources) / offline.INDEX).is_file():
        offline.use_bundle(sources)
    trees.unpack_archive(component, filename)
    schedule = make_schedule([HUNGRY], Peaks.of_any(), memory.measure(), limit=parse_limit(jobs))
    with tempfile.TemporaryDirectory(prefix="sparkforge-vllm-") as scratch:
        env = {
            **_repositories(table.stack(stack), Path(sources) if sources else None, Path(scratch)),
            "MAX_JOBS": str(schedule.max_jobs),
            "TORCH_CUDA_ARCH_LIST": image.architecture,
            "VLLM_TARGET_DEVICE": "cuda",
            "VLLM_VERSION_OVERRIDE": component.version,  # else it ends in the version of CUDA
        }
        say(f"compiling vLLM {component.version} for {image.architecture}, {schedule.max_jobs} jobs: an hour and more")
        arguments = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", scratch]
        run([python, "-m", "pip", *arguments, trees.tree_folder(component, filename)], env=env)
        compiled = next(Path(scratch).glob("vllm-*.whl"), None)
        if compiled is None:
            why = f"pip left no wheel of vLLM {component.version}"
            raise CompileError("vLLM was not compiled", why, "read pip's output above", code="compile.incomplete")
        file = PinnedFile(sha256=sha256_file(compiled), size=compiled.stat().st_size)
        known = component.model_copy(update={"pinned_files": {compiled.name: file}})
        queue = Queue.load(ROOT / "patches" / str(component.patches))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "vllm.part").open("wb") as output:
            entry = wheels.make(compiled, known, queue, REVISION, output)
    write_patched({**load_patched(), compiled.name: entry})
    return (folder / "vllm.part").replace(folder / entry.file)


def _repositories(stack: Stack, folder: Path | None, scratch: Path) -> dict[str, str]:
    """Return the variable of each of vLLM's repositories with its folder; what 12.1 does not use is stood in for."""
    variables, missing = dict[str, str](), dict[str, str]()
    for name, pin in stack.git.items():
        if pin.of != "vllm" or pin.src_dir is None or pin.switch:
            continue
        if not pin.needed:
            write_atomic(scratch / name / "left-out.h", vllm_sources.STAND_IN)
            variables[pin.src_dir] = str(scratch / name)
            continue
        try:
            repository = vllm_sources.repository(name, pin.src_dir, pin, folder).folder
            variables[pin.src_dir] = str(Path(str(repository), pin.folder))
        except CompileError as error:
            if error.code != "compile.inputs":
                raise
            missing[name] = error.why
    if missing:
        raise vllm_sources.missing_repositories(missing, {name: ["vLLM"] for name in missing}, stack)
    return variables
