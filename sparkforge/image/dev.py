"""Mounted checkouts in the development image: whether they are used, their stale parts, and how to compile these.

`python -m sparkforge.image.dev` runs at every start of that image. A checkout at /src/NAME is imported instead of the
installed package (by a .pth file). Files that its build would add (native modules, vendored Python, generated files;
.gitignore names them) become links to the installed files. The program lists changed sources of native modules with
the command that compiles them, and FlashInfer's cached modules that a change made stale.
"""

import fnmatch
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge import pins
from sparkforge.compile import cache, toolchain
from sparkforge.compile.flashinfer import sets
from sparkforge.compile.flashinfer.build import KernelRequest, build_kernels
from sparkforge.compile.jobs import make_schedule
from sparkforge.compile.vllm.build import ExtensionRequest, build_extensions
from sparkforge.core import manifest, memory, paths
from sparkforge.core.console import echo, say
from sparkforge.core.errors import ProcessError, StorageError, UsageError
from sparkforge.core.files import atomic_file, read_text, sha256_file, write_atomic
from sparkforge.core.git import git
from sparkforge.core.process import run_unchecked
from sparkforge.core.program import exit_code
from sparkforge.image import compose, rootfs
from sparkforge.image.devices import CUDA
from sparkforge.patching import series
from sparkforge.patching.hunks import FileChange, read_files

SOURCES = Path("/src")
TREE = Path("/opt/venv")
NATIVE = "*.so"
GENERATED = ("__pycache__", ".git")  # never linked
# Limits of jobs for programs that do not know a unit's memory: vLLM's setup.py, torch and FlashInfer; CMake.
JOBS = ("MAX_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL")
COMPOSE = "docker compose -f docker-compose.dev.yml"
CHANGED = "changed"  # the value of `--units` for edited sources
HUNGRY = "vllm/any.cu.o"  # a unit without a measured peak
UNITS = (".cu", ".cpp")  # sources that are units; a header is part of the units that include it


@dataclass(frozen=True)
class Checkout:
    """A repository that may be mounted: its package, the package's place, its sources and the command to compile it.

    `roots` are folders of the repository that may hold the package. `sources` are the sources of the native modules.
    `links` are folders of which the installed package has copies: path below the root → path in the repository.
    `products` are patterns of files that a build makes and the repository's .gitignore does not name.
    """

    name: str
    package: str
    sources: tuple[str, ...]
    rebuild: str
    roots: tuple[str, ...] = (".",)
    links: Mapping[str, str] = field(default_factory=dict)
    products: tuple[str, ...] = (NATIVE,)

    @property
    def variable(self) -> str:
        """The variable of docker-compose.dev.yml that names the checkout's folder."""
        return f"{self.name.upper()}_SRC"


CHECKOUTS = (
    Checkout("vllm", "vllm", ("csrc", "cmake", "CMakeLists.txt"), "./inv dev.build vllm"),
    Checkout(
        "flashinfer", "flashinfer", ("csrc", "include"), "./inv dev.build flashinfer",
        links={f"flashinfer/data/{name}": name for name in ("csrc", "include")}
        | {f"flashinfer/data/{name}": f"3rdparty/{name}" for name in ("cutlass", "spdlog", "cccl")},
    ),
    Checkout(
        "triton", "triton", ("include", "lib", "python/src", "third_party", "CMakeLists.txt"),
        "pip install --no-build-isolation --no-deps -e /src/triton", roots=("python", "."),
        links={f"triton/backends/{name}": f"third_party/{name}/backend" for name in ("nvidia", "amd")},
        products=(NATIVE, "triton/backends/*/bin/*", "triton/backends/*/lib/*", "triton/backends/*/include/*"),
    ),
    Checkout("triton_kernels", "triton_kernels", (), "", roots=("python/triton_kernels", ".")),
)  # fmt: skip
COMPILED = ("vllm", "flashinfer")  # by `./inv dev.build`


def named(name: str) -> Checkout:
    """Return a checkout by its name. Raises UsageError."""
    for checkout in CHECKOUTS:
        if checkout.name == name:
            return checkout
    raise UsageError(f"there is no checkout {name!r}", f"choose from {', '.join(COMPILED)}", "./inv dev.build vllm")


def root_of(checkout: Checkout, sources: Path = SOURCES) -> Path | None:
    """Return the folder that holds the checkout's package; None in an empty mount. Raises StorageError."""
    folder = sources / checkout.name
    try:
        for root in checkout.roots:
            if (folder / root / checkout.package / "__init__.py").is_file():
                return Path(os.path.normpath(folder / root))
    except PermissionError as error:
        why = f"{error.strerror} (running as uid {os.getuid()})"
        fix = f'chmod -R a+rX "${checkout.variable}"   # on the host'
        raise StorageError(f"cannot read the checkout in {folder}", why, fix, code="storage.access") from error
    return None


def use(checkouts: Sequence[Checkout], packages: Path, sources: Path = SOURCES, jobs: int = 0) -> None:
    """Let exactly these checkouts be imported instead of the installed packages; limit compile jobs to `jobs`.

    A user's own `pip install -e` compiles with as many jobs as cores unless a variable sets fewer.
    """
    folders = [f"{root}" for checkout in checkouts if (root := root_of(checkout, sources))]
    # A path in a .pth file goes to the end of sys.path, too late; an import line can put it in front (site.py).
    code = f"import sys; sys.path[:0] = {folders!r}\n" if folders else ""
    if jobs:
        code += f"import os; [os.environ.setdefault(name, '{jobs}') for name in {JOBS!r}]\n"
    write_atomic(packages / "aaa-sparkforge-dev.pth", code)


def link_natives(checkout: Checkout, packages: Path, sources: Path = SOURCES) -> list[str]:
    """Link the files that a build would add and the checkout lacks; return their paths. Raises StorageError."""
    root, installed = root_of(checkout, sources), packages / checkout.package
    if root is None or not installed.is_dir():
        return []
    repository = sources / checkout.name
    linked = []
    try:
        for path, target in checkout.links.items():
            if (repository / target).is_dir() and any((repository / target).iterdir()):
                linked += _link(root / path, repository / target)
        missing = list(_missing(installed, packages, root))
        products = _ignored(missing, root, repository)
        products |= {path for path in missing for pattern in checkout.products if fnmatch.fnmatch(path, f"*{pattern}")}
        for path in missing:
            if path in products and not any((root / parent).is_symlink() for parent in Path(path).parents[:-1]):
                linked += _link(root / path, packages / path)
    except PermissionError as error:
        why = f"{error.strerror} (running as uid {os.getuid()})"
        fix = f'sudo chown -R {os.getuid()} "${checkout.variable}"   # on the host: the checkout\'s folder'
        raise StorageError(f"cannot write {error.filename}", why, fix, code="storage.access") from error
    return [os.path.relpath(link, root / checkout.package) for link in linked]


def _link(link: Path, target: Path) -> list[Path]:
    """Make one link unless a file is there. Replace a broken link, which is left from an older image."""
    if link.is_symlink() and not link.exists():
        link.unlink()
    if os.path.lexists(link):
        return []
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return [link]


def _missing(folder: Path, packages: Path, root: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        relative = path.relative_to(packages)
        if path.name in GENERATED or path.suffix == ".pyc":
            continue
        if not (root / relative).exists():
            yield str(relative)
        if path.is_dir() and not path.is_symlink() and not (root / relative).is_symlink():
            yield from _missing(path, packages, root)


def _ignored(candidates: Iterable[str], root: Path, repository: Path) -> set[str]:
    """Return the paths that the repository's .gitignore names, as products of a build; none without a .gitignore.

    git runs on an empty repository of ours with this work tree, because the real one may be a linked work tree, whose
    objects are outside the mount, or belong to another user.
    """
    prefix = root.relative_to(repository)
    names = {os.path.normpath(prefix / path): path for path in candidates}
    with tempfile.TemporaryDirectory(prefix="sparkforge-dev-") as scratch:
        try:
            git(Path(scratch), "init", "--quiet", "--bare", "ask.git")
            result = run_unchecked(
                ["git", f"--git-dir={scratch}/ask.git", f"--work-tree={repository}", "check-ignore", "-z", "--no-index",
                 "--stdin"],
                cwd=repository, stdin="\0".join(names),
            )  # fmt: skip
        except ProcessError as error:
            say(f"  git cannot read {repository}/.gitignore: {error.why}; only native modules are linked")
            return set()
    return {names[name] for name in result.stdout.split("\0") if name in names}


def fingerprints(checkout: Checkout, sources: Path = SOURCES) -> dict[str, str]:
    """Return path → sha256 of the sources of the checkout's native modules."""
    root, files = sources / checkout.name, list[Path]()
    for name in checkout.sources:
        if (root / name).is_file():
            files.append(root / name)
        for top, folders, names in os.walk(root / name):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            files += [file for name in names if (file := Path(top, name)).is_file()]
    return {str(path.relative_to(root)): sha256_file(path) for path in sorted(files)}


def changed(checkout: Checkout, sources: Path = SOURCES) -> list[str]:
    """Return the sources that changed since the native modules were accepted; the first call accepts them."""
    now, record = fingerprints(checkout, sources), _record(checkout)
    if not record.is_file():
        accept(checkout, now)
        return []
    lines = read_text(record).splitlines()
    known = {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
    return sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))


def accept(checkout: Checkout, now: Mapping[str, str]) -> None:
    """Record that the native modules were made from the sources with these fingerprints."""
    write_atomic(_record(checkout), "".join(f"{sha256}  {name}\n" for name, sha256 in now.items()))


def _record(checkout: Checkout) -> Path:
    return paths.state() / "dev" / f"{checkout.name}.sha256"


def missing_patches(checkout: Checkout, stack: str, sources: Path) -> list[str]:
    """Return the patches of `stack` that the checkout lacks: a file has a hunk's old text and not its new text."""
    queues = [queue for _, queue in series.queues(pins.load(), stack) if queue.upstream == checkout.name]
    patches = [patch for queue in queues for patch in queue.for_tree(sources / checkout.name).patches]
    files = read_files(sources / checkout.name, {change.path for patch in patches for change in patch.changes})

    def is_missing(change: FileChange) -> bool:
        content = files[change.path]
        if content is None:
            return change.creates
        hunks = [(b"".join(hunk.before), b"".join(hunk.after)) for hunk in change.hunks]
        return any(old in content and new not in content for old, new in hunks)

    return [patch.name for patch in patches if any(map(is_missing, patch.changes))]


def check_mounted(packages: Path, stack: str, sources: Path = SOURCES) -> None:
    """Print for each checkout whether it is used, its missing patches, and the parts to compile again."""
    present = [checkout for checkout in CHECKOUTS if root_of(checkout, sources)]
    use(present, packages, sources, jobs := max_jobs())
    say(f"own builds (pip install -e, cmake): {' and '.join(JOBS)} are {jobs}, which fits the memory that is free now")
    for checkout in CHECKOUTS:
        name, folder = checkout.name, sources / checkout.name
        if checkout not in present:
            say(f"{name}: no checkout in {folder}; the installed package is used")
            continue
        linked, differing = link_natives(checkout, packages, sources), changed(checkout, sources)
        say(f"{name}: {folder} is used" + (f", {len(linked)} files that a build makes are linked" if linked else ""))
        if lacking := missing_patches(checkout, stack, sources):
            command = f".venv/bin/python -m lab.patches into CHECKOUT --stack {stack}"
            say(f"  lacks {', '.join(lacking)}: on the host, {command}")
        if differing and not checkout.rebuild:
            accept(checkout, fingerprints(checkout, sources))
        elif differing:
            advice = checkout.rebuild
            if name in COMPILED and pins.load().image(stack).device != CUDA:
                kept = f"{stack} compiles nothing; the installed native modules stay in use"
                advice = f"again   # or another stack: {kept}"
            say(f"  {len(differing)} native sources changed, such as {differing[0]}: {advice}")
            say(f"  if you have compiled them by hand: ./inv dev.build {name} --accept")
        # FlashInfer's cached modules that no stack pins, or that are made from a changed source.
        modules = cache.modules(cache.default_root()) if name == "flashinfer" else []
        remade = [module for path in differing for module in cache.made_from(modules, folder / path)]
        if stale := sorted({module.name for module in modules if module in remade or cache.why_stale(module)}):
            say(f"  stale in the cache: {', '.join(stale)}: ./inv clean-cache --module {','.join(stale)}")


def max_jobs() -> int:
    """Return how many compilations without a measured peak fit into the free memory, at least one."""
    return make_schedule([HUNGRY], memory.measure()).max_jobs


@dataclass(frozen=True)
class BuildOptions:
    """The options of `./inv dev.build`; an empty text means the stack's own. Targets are vLLM's, a set FlashInfer's.

    `units` are comma-separated patterns of source files, or `CHANGED`: those edited since native modules were accepted.
    """

    targets: str = ""
    set_name: str = ""
    git_sources: str = ""
    jobs: str = "auto"
    accept: bool = False
    units: str = ""


def build(name: str, stack: str, options: BuildOptions, *, tree: Path = TREE, sources: Path = SOURCES) -> None:
    """Compile a mounted checkout for the stack's architecture, print the result, and accept its sources.

    Raises UsageError if there is nothing to compile, and the errors of both builds.
    """
    checkout, table = named(name), pins.load()
    _require_meaningful(name, stack, options)
    root = root_of(checkout, sources)
    if root is None:
        why = f"{sources / name} holds none; the stack {stack} serves the installed package"
        fix = f"{COMPOSE} up -d dev   # on the host, with {checkout.variable} set to the checkout's folder"
        raise UsageError(f"there is no checkout of {name}", why, fix)
    before = fingerprints(checkout, sources)  # before the build: later edits are not accepted
    if options.accept:
        accept(checkout, before)
        say(f"{name}: recorded that the native modules in {sources / name} are made from its current sources")
        return
    if name not in COMPILED:
        fix = checkout.rebuild or "restart the server"
        raise UsageError(f"./inv dev.build does not compile {name}", "it has its own build, or none", fix)
    if table.image(stack).device != CUDA:
        fix = f"SPARKFORGE_STACK={table.default} {COMPOSE} up -d --build dev   # on the host"
        raise UsageError(f"the stack {stack} compiles nothing", "it has no CUDA compiler and serves without a GPU", fix)
    if (home := rootfs.Tree(tree, stack).packages / toolchain.HOME).is_dir():
        os.environ["CUDA_HOME"] = str(home)
    python = str(tree / "bin/python")
    if name == "flashinfer":
        cached = str(cache.default_root().parents[1])  # the cache that the servers of this volume read
        build_kernels(KernelRequest(stack, options.set_name, "", options.jobs, cached, python, str(root)))
    else:
        units = _units(checkout, options.units, sources)
        request = ExtensionRequest(
            stack, options.targets, options.git_sources, options.jobs, python=python, checkout=str(root), units=units,
            output=str(paths.state() / "dev" / "vllm-overlay"),
        )  # fmt: skip
        overlay, _ = build_extensions(request)
        if units:
            say(f"nothing was linked, and the libraries in {root} are unchanged; to link: ./inv dev.build vllm")
            return
        record = manifest.load(overlay)
        for library in sorted(record.outputs) if record else ():
            (root / library).unlink(missing_ok=True)  # a link: its target must not be written
            with (overlay / library).open("rb") as source, atomic_file(root / library, mode=0o755) as target:
                shutil.copyfileobj(source, target)
            say(f"  {root / library}: compiled here")
    if not options.targets:
        accept(checkout, before)
    say(f"restart its server, on the host: {COMPOSE} --profile serve restart serve")


def _require_meaningful(name: str, stack: str, options: BuildOptions) -> None:
    owners = {
        "set": ("flashinfer", options.set_name), "targets": ("vllm", options.targets),
        "sources": ("vllm", options.git_sources), "units": ("vllm", options.units),
    }  # fmt: skip
    for option, (owner, value) in owners.items():
        if value and name != owner:
            raise UsageError(f"--{option} has no meaning for {name}", f"it is for {owner}", f"without --{option}")
    if options.set_name:
        sets.load(pins.load().component(stack, "flashinfer").version).chosen(options.set_name)


def _units(checkout: Checkout, units: str, sources: Path) -> tuple[str, ...]:
    if units != CHANGED:
        return tuple(pattern for pattern in units.split(",") if pattern)
    edited = changed(checkout, sources)
    chosen = tuple(name for name in edited if name.endswith(UNITS) and (sources / checkout.name / name).is_file())
    if not chosen:
        why = f"edited: {', '.join(edited[:3]) or 'no native sources'}; none of them is a unit"
        raise UsageError("there is no edited unit", why, "without --units   # or --units 'csrc/moe/*.cu'")
    return chosen


def main(arguments: Sequence[str]) -> int:
    """Check the mounted checkouts, or print the number of jobs; return the exit code."""
    stack = os.environ[compose.STACK]
    if arguments[:1] == ["jobs"]:
        return exit_code(lambda: echo(str(max_jobs())))
    return exit_code(lambda: check_mounted(rootfs.Tree(TREE, stack).packages, stack))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
