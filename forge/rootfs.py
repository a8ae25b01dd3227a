"""What an image holds of Python: `python -m forge.rootfs STEP`, run by the stages of the Dockerfile.

One tree at /opt/venv: a hash-locked set, patched, without what the device cannot load (`deploy/trim.toml`), its
bytecode the same in every build. The tree is judged last, by what its own records say of every file.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module as room  # a room is loaded only by the step that needs it
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from forge import envs, locks, patch, pins, toolchain, torch_cpu, trimming
from forge.pins import Component, Pins
from sparkforge.console import say, show_error
from sparkforge.errors import ImageTreeError, SparkforgeError, UsageError
from sparkforge.files import sha256_file, write_atomic, write_json
from sparkforge.paths import ROOT
from sparkforge.process import run

CPU, CUDA, ARCH = "cpu", "cuda", "12.1a"
STACKS = {CPU: "embedded", CUDA: "spark"}
# FlashInfer loads a module from here without a lock, ninja or a compiler (flashinfer/jit/env.py: FLASHINFER_AOT_DIR).
AHEAD_OF_TIME = "flashinfer/data/aot"
REPORT = "audit.json"  # beside the manifest
# Written at install, with times and paths of the build.
VOLATILE = ("uv_cache.json", "direct_url.json", "REQUESTED")


@dataclass(frozen=True)
class Tree:
    """A virtual environment that becomes part of an image for `device`."""

    root: Path
    device: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / "bin/python"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        return next((self.root / "lib").glob("python3.*")) / "site-packages"

    @property
    def lock(self) -> str:
        """The set that it is made from."""
        if self.device == CPU:
            return "embedded"
        return "spark" if os.uname().machine == "aarch64" else "spark-amd64"


def install(tree: Tree, more: str = "") -> None:
    """Make the tree from its lock, and the lock `more`, and patch it.

    Raises the errors of `locks.install`, `torch_cpu` and `patch.apply`.
    """
    table = pins.load()
    shutil.rmtree(tree.root, ignore_errors=True)
    run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", _base_python(), tree.root])
    if tree.device == CPU:
        _install_cpu(tree, table)
    else:
        _install_cuda(tree)
    if more:
        locks.install(tree.python, more, bytecode=False)
    for queue in queues(tree.device, table):
        say(f"{queue.upstream}-{queue.version}: {patch.apply(tree.packages, queue)}")
    name_project(tree.packages)


def _base_python() -> Path:
    """Return the distribution's interpreter, not that of the environment which runs us."""
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def _install_cpu(tree: Tree, table: Pins) -> None:
    torch = table.component("embedded", "torch")
    wheels = (envs.fetch_vllm(table), torch_cpu.fetch_torch(torch))
    extra = f"torch=={torch.version} --hash=sha256:{torch_cpu.pinned_file(torch)[1]}"
    links = tuple(wheel.parent for wheel in wheels)
    locks.install(tree.python, tree.lock, find_links=links, extra=(extra,), bytecode=False)
    name_package(tree.packages, "vllm", f"{table.component('embedded', 'vllm').version}+cpu")


def _install_cuda(tree: Tree) -> None:
    locks.install(tree.python, tree.lock, bytecode=False)
    home = tree.packages / toolchain.HOME
    toolchain.add_links(home)
    toolchain.make_stub(home, toolchain.host_compiler(home)[0])


def queues(device: str, table: Pins) -> Iterator[patch.Queue]:
    """Yield each patch queue that belongs to the device's tree, once."""
    components: dict[str, Component] = table.stacks[STACKS[device]].components
    for folder in dict.fromkeys(each.patches for each in components.values() if each.patches):
        yield patch.Queue.load(ROOT / "patches" / folder)


def name_package(packages: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write the metadata by which importlib finds a distribution that no wheel brought."""
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (folder / "INSTALLER").write_text("sparkforge\n", encoding="utf-8")
    if entry_points:
        (folder / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def name_project(packages: Path) -> None:
    """Make this checkout importable in the tree, and let vLLM find its plugins."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(points.items()))
        for group, points in sorted(project["entry-points"].items())
    )
    name_package(packages, project["name"], project["version"], groups)
    (packages / "sparkforge.pth").write_text(f"{ROOT}\n", encoding="utf-8")


def compile_kernels(tree: Tree, built: Path, name: str, jobs: str) -> None:
    """Compile a set of FlashInfer's modules with the tree's own CUDA, and put them where a server loads them.

    Raises the errors of `kernels.show`, and ImageTreeError if nothing was made.
    """
    os.environ["CUDA_HOME"] = str(tree.packages / toolchain.HOME)
    room("forge.kernels").show(name, ARCH, jobs, str(built), str(tree.python))
    take_kernels(tree, built)


def compile_vllm(tree: Tree, sources: Path, targets: str, jobs: str) -> None:
    """Compile vLLM's own extensions against the tree, and lay them over upstream's. Raises the errors of both.

    `sources` is an unpacked bundle or has a checkout for each repository; an empty folder means the network.
    """
    os.environ["CUDA_HOME"] = str(tree.packages / toolchain.HOME)
    brought = str(sources) if any(sources.iterdir()) else ""
    overlay = room("forge.vllm_build").show(targets, brought, jobs, ARCH, str(tree.python), "")
    room("forge.vllm_overlay").show_put(overlay, str(tree.packages))


def take_kernels(tree: Tree, built: Path) -> None:
    """Copy the modules under `built`, a FlashInfer workspace, to where FlashInfer loads them without a compiler."""
    modules = sorted(built.glob(".cache/flashinfer/*/*/cached_ops/*/*.so"))
    if not modules:
        raise ImageTreeError("there are no kernels to put into the image", f"{built} holds none", "./inv build.kernels")
    for module in modules:
        target = tree.packages / AHEAD_OF_TIME / module.stem / module.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, target)
    say(f"{len(modules)} modules of FlashInfer: {', '.join(module.stem for module in modules)}")


def finish(tree: Tree, jobs: int) -> None:
    """Trim the tree and make it the same in every build: no volatile files, no times, bytecode in one order."""
    for name, size in trimming.trim(tree.packages, trimming.cuts(tree.device)).items():
        say(f"left out: {name} ({size / 1e6:.0f} MB)")
    for name in VOLATILE:
        for path in tree.packages.glob(f"*.dist-info/{name}"):
            path.unlink()
    for record in tree.packages.glob("*.dist-info/RECORD"):
        forget_volatile(record)
    for path in sorted(tree.packages.rglob("__pycache__")):
        shutil.rmtree(path)
    compile_bytecode(tree, jobs)


def forget_volatile(record: Path) -> None:
    """Take the files that are not kept out of a record, which has their hashes: those are other ones in every build."""
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if Path(line.partition(",")[0]).name not in VOLATILE]
    if kept != lines:
        write_atomic(record, "".join(kept))


def compile_bytecode(tree: Tree, jobs: int) -> None:
    """Compile every package in a process of its own: what a .pyc holds depends on what its process compiled before it.

    The image cannot write bytecode (its root is read-only), and without it each of vLLM's processes starts 6 s later.
    Unchecked hashes instead of times, for the image's times are one epoch (PEP 552). What a .pth file imports when a
    process starts must not leave bytecode of its own, with times.
    """
    env = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}

    def compile_one(path: Path) -> None:
        """Compile one package, or one module beside the packages."""
        flags = ["--invalidation-mode", "unchecked-hash", "-q", "-q", "-j", "1"]
        run([tree.python, "-m", "compileall", *flags, path], env=env, check=False)

    places = sorted(path for path in tree.packages.iterdir() if path.suffix in ("", ".py") and _holds_python(path))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, places))


def _holds_python(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and next(path.rglob("*.py"), None) is not None)


def judge(tree: Tree) -> dict[str, Any]:
    """Audit the machine code that gpt-oss runs on, FlashInfer's modules and vLLM's libraries; return the report.

    It says nothing of how long that took, or it would be another in every build. The CPU's image has no such code, and
    its report is empty. Raises AuditError.
    """
    if tree.device != CUDA:
        return {}
    files = sorted([*(tree.packages / AHEAD_OF_TIME).rglob("*.so"), *(tree.packages / "vllm").glob("*.so")])
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "audit.json"
        room("forge.audit").show(files, machine=os.uname().machine, output=output)
        document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return {key: value for key, value in document.items() if key not in ("seconds", "mb_per_second")}


def verify(tree: Tree) -> int:
    """Return how many files are as their wheels' records say, patched ones as the patches' record says.

    Raises ImageTreeError if one differs, if one that should be there is not, or if a package is not in the lock.
    """
    table = pins.load()
    changed = {path for queue in queues(tree.device, table) for path in _patched(tree, queue)}
    changed |= _overlaid(tree)
    gone = trimming.cuts(tree.device)
    locked_names = _locked(tree.lock) | {"vllm", "torch", "sparkforge"}
    files, wrong = list[tuple[str, str]](), list[str]()
    for record in sorted(tree.packages.glob("*.dist-info/RECORD")):
        name = canonicalize_name(record.parent.name.split("-")[0])
        if name not in locked_names:
            wrong.append(f"{name} is in no lock")
        files += [
            (path, sha256)
            for path, sha256 in _record(record)
            if path not in changed and not trimming.is_cut(path, gone)
        ]
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter's lock
        found = pool.map(lambda one: _differs(tree.packages / one[0], one[1]), files)
        wrong += [f"{path} {why}" for (path, _), why in zip(files, found, strict=True) if why]
    if wrong:
        told = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ImageTreeError(f"{tree.root} is not what its locks say", told, "build the image again, with --no-cache")
    return len(files)


def _patched(tree: Tree, queue: patch.Queue) -> set[str]:
    found = patch.inspect(tree.packages, queue)
    if found.state is not patch.State.APPLIED or found.record is None:
        what = f"the queue {queue.upstream}-{queue.version} is not in the image"
        raise ImageTreeError(what, f"its state is {found.state.value} {' '.join(found.edited)}", "build it again")
    return set(found.record.files)


def _overlaid(tree: Tree) -> set[str]:
    """Return what was compiled here and laid over upstream's wheel; the overlay was audited before it was laid."""
    record = tree.packages / room("forge.vllm_overlay").RECORD
    return set(json.loads(record.read_text(encoding="utf-8"))["files"]) if record.is_file() else set()


def _locked(name: str) -> set[str]:
    lines = locks.lock_path(name).read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(found[1]) for line in lines if (found := re.match(r"([A-Za-z0-9._-]+)(\[.*\])?==", line))}


def _record(record: Path) -> Iterator[tuple[str, str]]:
    """Yield path and sha256 (base64, as the wheel has it) of every file that the record hashes."""
    with record.open(encoding="utf-8", newline="") as file:
        for path, digest, _ in csv.reader(file):
            ours = path.startswith("../") or path.endswith(".pyc") or Path(path).name in VOLATILE
            if digest.startswith("sha256=") and not ours:
                yield path, digest.removeprefix("sha256=")


def _differs(path: Path, sha256: str) -> str:
    if not path.is_file():
        return "is missing"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return "" if urlsafe_b64encode(digest).rstrip(b"=").decode() == sha256 else "differs from its wheel"


def describe(tree: Tree) -> dict[str, Any]:
    """Return what the image says of itself: versions, queues with their hashes, lock, kernels, and a key of it all."""
    table = pins.load()
    parts = [path.name.removesuffix(".dist-info").rpartition("-") for path in sorted(tree.packages.glob("*.dist-info"))]
    libraries = sorted((tree.packages / AHEAD_OF_TIME).glob("*/*.so"))
    document: dict[str, Any] = {
        "device": tree.device,
        "machine": os.uname().machine,
        "python": sys.version.split()[0],
        "lock": {tree.lock: hashlib.sha256(locks.lock_path(tree.lock).read_bytes()).hexdigest()},
        "packages": {canonicalize_name(name): version for name, _, version in parts},
        "patches": {f"{queue.upstream}-{queue.version}": queue.sha256 for queue in queues(tree.device, table)},
        "kernels": {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in libraries},
    }
    # Caches of compiled code are kept under this key: times cannot tell one image's sources from another's.
    document["key"] = hashlib.sha256(repr(document).encode()).hexdigest()[:16]
    return document


STEPS: dict[str, Callable[[Tree, argparse.Namespace], None]] = {
    "toolchain": lambda _tree, _told: toolchain.show(),
    "install": lambda tree, told: install(tree, told.more),
    "kernels": lambda tree, told: compile_kernels(tree, told.built, told.set, told.jobs),
    "vllm": lambda tree, told: compile_vllm(tree, told.sources, told.targets, told.jobs),
    "finish": lambda tree, told: finish(tree, _jobs(told.jobs)),
    "verify": lambda tree, told: _verify(tree, told.describe),
}


def _verify(tree: Tree, output: Path) -> None:
    """Judge the tree; leave the report beside the manifest, which names it by hash."""
    files = verify(tree)
    say(f"{files} files are as their wheels and patches say")
    report = output.with_name(REPORT)
    write_json(report, {"files": files, "code": judge(tree)})
    write_json(output, {**describe(tree), "audit": {REPORT: sha256_file(report)}})


def main(words: Sequence[str]) -> int:
    """Run one step; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m forge.rootfs", description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", choices=(CPU, CUDA), required=True)
    parser.add_argument("--tree", type=Path, default=Path("/opt/venv"))
    parser.add_argument("--with", dest="more", default="", help="a further lock to install")
    parser.add_argument("--set", default="gpt-oss", help="a set of forge/kernels.toml")
    parser.add_argument("--built", type=Path, default=Path("/kernels"), help="where the kernels are built")
    parser.add_argument("--sources", type=Path, default=Path("/mnt/bundle"), help="what vLLM is compiled from")
    parser.add_argument("--targets", default="", help="CMake targets of vLLM, with commas; none: all that SM121 uses")
    parser.add_argument("--jobs", default="auto")
    parser.add_argument("--describe", type=Path, default=Path("/opt/image.json"), help="where to say what there is")
    told = parser.parse_args(words)
    try:
        STEPS[told.step](Tree(told.tree, told.device), told)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return 0


def _jobs(text: str) -> int:
    if text == "auto":
        return os.cpu_count() or 1
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise UsageError(f"--jobs {text!r} is no number", "it takes auto or 1, 2, …", "--jobs auto")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
