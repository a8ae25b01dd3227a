"""The Python environment of an image: `python -m sparkforge.image.rootfs STEP`, run by the stages of the Dockerfile.

It is one tree at /opt/venv: a hash-locked, patched set, without files that its device cannot load (`deploy/trim.toml`),
and with the same bytecode in every build. Last, every file is compared with its RECORD. Our own packages are in another
folder of the image, which is on PYTHONPATH (Dockerfile).
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sparkforge import environments, pins
from sparkforge.audit import report as audit_report
from sparkforge.audit.report import AuditedWheel, audit_installed
from sparkforge.compile import toolchain
from sparkforge.compile.flashinfer.build import AHEAD_OF_TIME, KernelRequest, build_kernels
from sparkforge.compile.jobs import parse_limit
from sparkforge.compile.stages import RECORD as OVERLAY
from sparkforge.compile.stages import install_overlay, require_way
from sparkforge.compile.vllm.build import ExtensionRequest, build_extensions
from sparkforge.core.console import say
from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import read_json, read_toml, sha256_file, write_atomic, write_json
from sparkforge.core.installed import Installed, is_below
from sparkforge.core.manifest import remove
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, run_unchecked
from sparkforge.core.program import exit_code
from sparkforge.image import licences, packs, sbom
from sparkforge.image.devices import CUDA, machine_of
from sparkforge.patching import series
from sparkforge.pins import StackImage, locks
from sparkforge.pins.verify import ImageChanges, load_patched, patched_packages
from sparkforge.sources import bundle

SIGNING_KEY = Path("/run/secrets/signing-key")  # a secret of the build; the kernel pack stays unsigned without it
REPORT, BILL = "audit.json", "sbom.json"  # beside the manifest
TRIMMING = ROOT / "deploy/trim.toml"  # the paths that each device's image leaves out
LOCK = ".lock"  # uv's lock file, which uv makes writable by everybody
# Files that an installation writes with times and paths of the build.
VOLATILE = ("uv_cache.json", "direct_url.json", "REQUESTED")


@dataclass(frozen=True)
class Tree:
    """A virtual environment that becomes part of a stack's image."""

    root: Path
    stack: str
    machine: str = toolchain.THIS_MACHINE  # the image's machine, as `uname -m` prints it

    @property
    def is_native(self) -> bool:
        """Whether the tree's packages can run here. Its interpreter always can: Debian has it at the same path."""
        return self.machine == toolchain.THIS_MACHINE

    @property
    def python(self) -> Path:
        """The tree's interpreter."""
        return self.root / "bin/python"

    @property
    def packages(self) -> Path:
        """The tree's site-packages."""
        return next((self.root / "lib").glob("python3.*")) / "site-packages"

    @property
    def inputs(self) -> StackImage:
        """The image's inputs in pins.toml."""
        return pins.load().image(self.stack)

    @property
    def device(self) -> str:
        """The image's device: cpu or cuda."""
        return self.inputs.device

    @property
    def lock(self) -> str:
        """The locked set for the tree's processor."""
        return self.inputs.lock(self.machine)


def install(tree: Tree, more: str = "") -> None:
    """Make the tree from its lock and the lock `more`. Raises as `environments.fetch_wheels` and `locks.install`."""
    table = pins.load()
    shutil.rmtree(tree.root, ignore_errors=True)
    # The distribution's interpreter, not the running environment's.
    base_python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", base_python, tree.root])
    # Packages that the lock does not install: patched wheels, and packages that no index lists.
    special = (pin for pin in table.stack(tree.stack).components.values() if pin.patches or pin.index)
    components = [pin for pin in special if any(name.endswith(".whl") for name in pin.files)]
    wheels = environments.fetch_wheels(tree.lock, components, tree.machine)
    locks.install(tree.python, tree.lock, wheels, machine=tree.machine)
    for component in components:
        if component.provides:
            environments.name_distribution(tree.packages, *component.provides.split("=="))
    if tree.device == CUDA:
        home = tree.packages / toolchain.HOME
        toolchain.add_links(home)
        toolchain.make_stub(home, toolchain.host_compiler(home, machine=tree.machine)[0])
    if more:
        locks.install(tree.python, more, machine=tree.machine)
    name_plugins(tree.packages)
    (tree.root / LOCK).unlink(missing_ok=True)


def name_plugins(packages: Path) -> None:
    """Let vLLM find the plugins of spark-mxfp4, whose package is outside the tree."""
    text = (ROOT / "spark_mxfp4" / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    groups = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(points.items()))
        for group, points in sorted(project["entry-points"].items())
    )
    environments.name_distribution(packages, project["name"], project["version"], groups)


def compile_kernels(tree: Tree, built: Path, name: str, jobs: str) -> None:
    """Take or compile a set of FlashInfer's modules with the tree's CUDA, and install them for the server.

    For another machine the locked toolchain and a separate environment compile them. A kernel pack is stored under
    `built`, for the Dockerfile's target `kernel-packs`. `name` is a set of the stack's kernel table; empty: the image's
    set. A stack without kernels compiles nothing. Raises the errors of `build_kernels`, and IntegrityError if no module
    was compiled.
    """
    if not tree.inputs.kernels:
        say(f"the stack {tree.stack} has no kernels to compile")
        return
    python = ""
    if tree.is_native:
        os.environ["CUDA_HOME"], python = str(tree.packages / toolchain.HOME), str(tree.python)
    take = packs.taking("")
    request = KernelRequest(tree.stack, name, "", jobs, str(built), python, take=take, machine=tree.machine)
    build_kernels(request)
    packs.publish(request, str(built / bundle.PACKS), SIGNING_KEY if SIGNING_KEY.is_file() else None)
    modules = sorted(built.glob(".cache/flashinfer/*/*/cached_ops/*/*.so"))
    if not modules:
        failure = "there are no kernels to put into the image"
        raise IntegrityError(failure, f"{built} holds none", "./inv build.kernels", code="integrity.image-tree")
    for module in modules:
        target = tree.packages / AHEAD_OF_TIME / module.stem / module.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, target)
    say(f"{len(modules)} modules of FlashInfer: {', '.join(module.stem for module in modules)}")


def compile_vllm(tree: Tree, sources: Path, targets: str, jobs: str) -> None:
    """Compile vLLM's extensions against the tree, and replace upstream's with them. Raises the errors of both steps.

    `sources` is an unpacked bundle or has a checkout of each repository; if it is empty, they are downloaded.
    """
    require_way("source", tree.machine)
    git_sources = str(sources) if any(sources.iterdir()) else ""
    os.environ["CUDA_HOME"] = str(tree.packages / toolchain.HOME)
    overlay, _ = build_extensions(
        ExtensionRequest(tree.stack, targets=targets, sources=git_sources, jobs=jobs, python=str(tree.python))
    )
    install_overlay(overlay, str(tree.packages))


def cuts(device: str) -> dict[str, list[str]]:
    """Return the paths below site-packages, by name, that deploy/trim.toml leaves out of the device's image."""
    entries: dict[str, dict[str, Any]] = read_toml(TRIMMING).get(device, {})
    return {name: row["paths"] for name, row in entries.items()}


def trim(packages: Path, cuts: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Remove the paths of `cuts`; return the bytes that each freed. Raises IntegrityError if a path matches nothing.

    If a path no longer exists, upstream moved a file, and the reason to remove it may no longer hold.
    """
    freed = dict.fromkeys(cuts, 0)
    for name, patterns in cuts.items():
        for pattern in patterns:
            matches = sorted(packages.glob(pattern))
            if not matches:
                why = f"{pattern} of [{name}] matches nothing under {packages}"
                fix = "less deploy/trim.toml   # look where upstream moved it"
                raise IntegrityError("the trimming table is out of date", why, fix, code="integrity.image-tree")
            for path in matches:
                files = [path, *path.rglob("*")] if not path.is_symlink() else []
                freed[name] += sum(f.lstat().st_size for f in files if f.is_file() and not f.is_symlink())
                remove(path)
    return freed


def cut_pattern(cuts: Mapping[str, Sequence[str]]) -> re.Pattern[str]:
    """Return a pattern for the beginning of every path in `cuts`; group 1 is the file or folder."""
    globs = "|".join(re.escape(path).replace(r"\*", "[^/]*") for paths in cuts.values() for path in paths)
    return re.compile(f"({globs})(?:/|$)")


def finish(tree: Tree, jobs: int) -> None:
    """Trim the tree, add licence texts, and make it the same in every build.

    Volatile files are removed, and the bytecode is compiled in a fixed order and without times. Raises IntegrityError
    for a path of the trimming table that matches nothing, or a wrong licence text.
    """
    for name, size in trim(tree.packages, cuts(tree.device)).items():
        say(f"left out: {name} ({size / 1e6:.0f} MB)")
    say(f"licence texts added: {', '.join(licences.add(tree.packages)) or 'none'}")
    for name in VOLATILE:
        for path in tree.packages.glob(f"*.dist-info/{name}"):
            path.unlink()
    for record in tree.packages.glob("*.dist-info/RECORD"):
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
        lasting = [line for line in lines if Path(line.partition(",")[0]).name not in VOLATILE]
        if lasting != lines:  # RECORD has their hashes, which differ in every build
            write_atomic(record, "".join(lasting))
    for path in sorted(tree.packages.rglob("__pycache__")):
        shutil.rmtree(path)
    (tree.root / LOCK).unlink(missing_ok=True)
    compile_bytecode(tree, jobs)


def compile_bytecode(tree: Tree, jobs: int) -> None:
    """Compile each package in a separate process, because a .pyc depends on earlier compilations in its process.

    The image's root is read-only, so vLLM cannot write bytecode; without it each of its processes starts 6 s later. The
    bytecode has unchecked hashes, because all times in the image are equal (PEP 552). A .pth file's imports at the
    start of a process must not write bytecode with times.
    """
    env = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}

    def compile_package(path: Path) -> None:
        flags = ["--invalidation-mode", "unchecked-hash", "-q", "-q", "-j", "1"]
        run_unchecked([tree.python, "-m", "compileall", *flags, path], env=env)

    modules = list(tree.packages.glob("*.py"))
    modules += [path for path in tree.packages.glob("*/") if not path.suffix and any(path.rglob("*.py"))]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_package, sorted(modules)))


def audit_code(tree: Tree) -> dict[str, Any]:
    """Audit the machine code that runs gpt-oss, in FlashInfer's modules and vLLM's libraries; return the report.

    The report leaves out the duration, which differs in every build. A CPU image has no such code and an empty report.
    Raises AuditError.
    """
    if tree.device != CUDA:
        return {}
    files = sorted([*(tree.packages / AHEAD_OF_TIME).rglob("*.so"), *(tree.packages / "vllm").glob("*.so")])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "audit.json"
        audit_report.run_audit(files, tools=toolchain.audit_tools, machine=tree.machine, output=output)
        document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return {key: value for key, value in document.items() if key not in ("seconds", "mb_per_second")}


def verify(tree: Tree) -> tuple[int, list[AuditedWheel]]:
    """Return the number of files that match their wheels' records, and the installed patched wheels.

    Raises IntegrityError if a file differs or is missing, if a package is not in the lock, or if a package that the
    stack patches is not the wheel in `locks/patched.toml`.
    """
    changes, lock, patched = image_changes(tree), load_patched(), patched_packages(pins.load(), tree.stack)
    names = re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==", locks.lock_path(tree.lock).read_text("utf-8"), re.MULTILINE)
    locked_names = {*map(canonicalize_name, names), "vllm", "torch", "spark-mxfp4"}
    files, problems, wheels = 0, list[str](), dict[str, AuditedWheel]()
    for record in sorted(tree.packages.glob("*.dist-info/RECORD")):
        installed = Installed.read(record.parent, strict=False)
        files += sum(not is_below(line.path, changes.left_out) for line in installed.lines)
        if installed.name in patched:
            wheels[installed.name] = audit_installed(record.parent, lock, changes)
            problems += wheels[installed.name].problems
            continue
        if installed.name not in locked_names:
            problems.append(f"{installed.name} is in no lock")
        problems += installed.differences(left_out=changes.left_out, compiled=changes.compiled, added=None)
    problems += [f"{name} is not installed" for name in patched if name not in wheels]
    if problems:
        why = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        fix = "docker compose build --no-cache   # on the host"
        raise IntegrityError(f"{tree.root} does not match its locks", why, fix, code="integrity.image-tree")
    return files, list(wheels.values())


def image_changes(tree: Tree) -> ImageChanges:
    """Return the build's changes to the installed wheels: files that the table leaves out, and compiled files."""
    pattern = cut_pattern(cuts(tree.device))
    records = [Installed.read(record.parent, strict=False) for record in tree.packages.glob("*.dist-info/RECORD")]
    paths = (line.path for installed in records for line in installed.lines)
    left_out = sorted({match[1] for path in paths if (match := pattern.match(path))})
    overlay = tree.packages / OVERLAY  # audited before it replaced files of the wheel
    files = read_json(overlay)["files"] if overlay.is_file() else {}
    return ImageChanges(left_out=tuple(left_out), compiled={path: change["after"] for path, change in files.items()})


def describe(tree: Tree) -> dict[str, Any]:
    """Return the image's manifest: versions, queues with their hashes, lock, kernels, and a key of all these."""
    table = pins.load()
    parts = [path.name.removesuffix(".dist-info").rpartition("-") for path in sorted(tree.packages.glob("*.dist-info"))]
    libraries = sorted((tree.packages / AHEAD_OF_TIME).glob("*/*.so"))
    document: dict[str, Any] = {
        "stack": tree.stack, "device": tree.device, "machine": tree.machine, "python": sys.version.split()[0],
        "lock": {tree.lock: hashlib.sha256(locks.lock_path(tree.lock).read_bytes()).hexdigest()},
        "packages": {canonicalize_name(name): version for name, _, version in parts},
        "patches": {queue.name: queue.sha256 for _, queue in series.queues(table, tree.stack)},
        "without licence text": list(licences.without(tree.packages)),
        **image_changes(tree).model_dump(mode="json"),
        "kernels": {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in libraries},
    }  # fmt: skip
    # Caches of compiled code have this key, because file times cannot tell the sources of two images apart.
    document["key"] = hashlib.sha256(repr(document).encode()).hexdigest()[:16]
    return document


STEPS: dict[str, Callable[[Tree, argparse.Namespace], None]] = {
    "toolchain": lambda tree, _options: toolchain.print_toolchain(tree.machine) if tree.device == CUDA else None,
    "install": lambda tree, options: install(tree, options.more),
    "kernels": lambda tree, options: compile_kernels(tree, options.built, options.set, options.jobs),
    "vllm": lambda tree, options: compile_vllm(tree, options.sources, options.targets, options.jobs),
    "finish": lambda tree, options: finish(tree, parse_limit(options.jobs) or os.cpu_count() or 1),
    "verify": lambda tree, options: _verify(tree, options.describe, options.debian),
}


def _verify(tree: Tree, output: Path, debian: Path) -> None:
    """Verify and audit the tree; write report and bill of materials beside the manifest, which has their hashes."""
    files, wheels = verify(tree)
    say(f"{files} files match their wheels, {len(wheels)} wheels are those of locks/patched.toml")
    report, bill, document, code = output.with_name(REPORT), output.with_name(BILL), describe(tree), audit_code(tree)
    write_json(report, {"files": files, "wheels": [asdict(wheel) for wheel in wheels], "code": code})
    write_atomic(bill, sbom.make(tree.packages, document, code, pins.load(), debian))
    texts = tree.root / licences.REPORT
    write_atomic(texts, licences.report(read_json(bill), tree.packages, debian))
    hashes = {path.name: sha256_file(path) for path in (bill, texts)}
    write_json(output, {**document, "audit": {REPORT: sha256_file(report)}, "sbom": hashes})


def main(arguments: Sequence[str]) -> int:
    """Run one step; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sparkforge.image.rootfs", description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--stack", required=True, help="a stack of pins.toml")
    parser.add_argument("--platform", default="", help="the image's platform, such as linux/arm64")
    parser.add_argument("--tree", type=Path, default=Path("/opt/venv"))
    parser.add_argument("--with", dest="more", default="", help="a further lock to install")
    parser.add_argument("--set", default="", help="a set of the stack's kernel table")
    parser.add_argument("--built", type=Path, default=Path("/kernels"), help="where the kernels are built")
    parser.add_argument("--sources", type=Path, default=Path("/mnt/bundle"), help="the sources of vLLM")
    parser.add_argument("--targets", default="", help="vLLM's CMake targets, comma-separated; none: all for SM121")
    parser.add_argument("--jobs", default="auto")
    parser.add_argument("--describe", type=Path, default=Path("/opt/image.json"), help="where to write the manifest")
    parser.add_argument("--debian", type=Path, default=Path("/"), help="a root with the image's Debian packages")
    options = parser.parse_args(arguments)
    step = STEPS[options.step]
    return exit_code(lambda: step(Tree(options.tree, options.stack, machine_of(options.platform)), options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
