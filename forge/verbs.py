"""The build side's commands, as thin as tasks.py, which names them: docstring and flags here, the work in the rooms."""

from __future__ import annotations

from importlib import import_module as room  # a room is loaded only by the verb that needs it
from pathlib import Path

from invoke.context import Context

from sparkforge.command import arguments, listed, verb
from sparkforge.console import say

OFFLINE = "folder of an unpacked bundle: use it instead of the network"
STACK, TREE = "a stack of pins.toml", "a tree to work on; default: the stack's unpacked sources"
UPSTREAM, DRY_RUN = "such as vllm or flashinfer", "say what would be done, change nothing"
ROOT = "the cache's folder, if it is not FlashInfer's own"


@verb(stack="a stack of pins.toml", no_git="leave out what upstream's builds fetch by git", offline=OFFLINE)
def sources(_ctx: Context, stack: str = "spark", no_git: bool = False, offline: str = "") -> None:
    """Bring every source that a build needs, by hash, and unpack it."""
    room("forge.offline").use_bundle(offline)
    room("forge.sources").show(stack, git=not no_git)


@verb(file="a file of a source tree or an environment")
def provenance(_ctx: Context, file: str) -> None:
    """Print the chain from a patched file back to its registry artifact and its patches."""
    room("forge.provenance").show(Path(file))


@verb(
    output="the file to write",
    stack="a stack of pins.toml",
    machine="x86_64 or aarch64; default: this one",
    python="such as 3.12; default: this one",
    more="further locks, such as spark, with commas",
)
def bundle_make(
    _ctx: Context,
    output: str = "sparkforge-bundle.tar",
    stack: str = "spark",
    machine: str = "",
    python: str = "",
    more: str = "",
) -> None:
    """Pack sources, wheels, patches and vocabulary for a machine without a network."""
    room("forge.bundle").show(Path(output), stack=stack, machine=machine, python=python, more=listed(more))


@verb(sha256="of the whole file, as the one who made it tells you")
def bundle_unpack(_ctx: Context, file: str, folder: str, sha256: str = "") -> None:
    """Unpack a bundle and verify every member of it."""
    room("forge.bundle").unpack(Path(file), Path(folder), sha256=sha256)


@verb(stack=STACK, tree=TREE, upstream=UPSTREAM, dry_run=DRY_RUN)
def patch_apply(_ctx: Context, stack: str = "spark", tree: str = "", upstream: str = "", dry_run: bool = False) -> None:
    """Apply the patch queues of a stack, exactly or not at all."""
    room("forge.queues").show_apply(stack, tree, upstream, dry_run=dry_run)


@verb(stack=STACK, tree=TREE, upstream=UPSTREAM, dry_run=DRY_RUN)
def patch_reverse(
    _ctx: Context, stack: str = "spark", tree: str = "", upstream: str = "", dry_run: bool = False
) -> None:
    """Put a patched tree back to upstream's bytes."""
    room("forge.queues").show_reverse(stack, tree, upstream, dry_run=dry_run)


@verb(stack=STACK, against="another release: 0.33.0 is vLLM's, else flashinfer-0.7.2.post1", tree=TREE)
def patch_status(_ctx: Context, stack: str = "spark", against: str = "", tree: str = "") -> None:
    """Say what a release does to each patch: applies, applies with offset, already upstream, conflicts."""
    room("forge.status").show(stack, against, tree)


@verb(
    stack=STACK,
    upstream=UPSTREAM,
    finish="write the patch from the edited copy",
    description="what it does and why",
    bug="URL of the report",
    drop_when="when it can go: contains PATH TEXT, or lacks PATH TEXT",
)
def patch_new(
    _ctx: Context,
    name: str,
    stack: str = "spark",
    upstream: str = "vllm",
    finish: bool = False,
    description: str = "",
    bug: str = "",
    drop_when: str = "",
) -> None:
    """Make a scratch copy to edit; with --finish write the patch and name it in the series."""
    given = {"description": description, "bug": bug, "drop_when": drop_when}
    fields = {key: text for key, text in given.items() if text}
    room("forge.authoring").show(name, stack=stack, of=upstream, finish=finish, **fields)


@verb(to="the version to carry it to", stack=STACK, drop="numbers of patches to leave behind, with commas")
def patch_rebase(_ctx: Context, to: str, stack: str = "spark", drop: str = "") -> None:
    """Carry a queue over to another release, into a folder of its own."""
    room("forge.rebase").show(to, stack, drop)


@verb()
def pins_check(_ctx: Context) -> None:
    """Refuse what is wrong in pins.toml, and locks that are older than their inputs."""
    table = room("forge.pins").load()
    room("forge.locks").require_current()
    say(f"pins.toml is well-formed: {len(list(table.components()))} components in {', '.join(table.stacks)}")


@verb()
def pins_lock(_ctx: Context) -> None:
    """Resolve every locks/*.in again into its hash-locked set."""
    say(f"locked {', '.join(path.name for path in room('forge.locks').compile_all())}")


@verb()
def pins_debian(_ctx: Context) -> None:
    """Lock the images' Debian packages again, every one by sha256."""
    room("forge.debian").show()


@verb(device="cpu or cuda", more="further arguments for docker buildx build, such as --build-context NAME=PLACE")
def verify_reproducible(_ctx: Context, device: str = "cpu", more: str = "") -> None:
    """Build an image twice, as differently as an honest builder could, and compare the bytes."""
    room("forge.reproducible").show(device, "runtime", arguments("--more", more))


@verb(output="JSON file for the figures")
def bench_image(_ctx: Context, output: str = "bench/results/image.json") -> None:
    """Time cold and warm image builds and a start, weigh the layers, project the Spark's image."""
    room("bench.image").main(output)


@verb(stack="one stack only")
def pins_update(_ctx: Context, stack: str = "") -> None:
    """Propose newer versions as a diff of pins.toml, with what the patches would do there; changes nothing."""
    room("forge.update").show(stack)


@verb()
def toolchain(_ctx: Context) -> None:
    """Find or install the compilers for 12.1a, and say which they are."""
    room("forge.toolchain").show()


@verb(
    set="gpt-oss, or all: what other options of its server call too",
    arch="12.1a: the DGX Spark's",
    jobs="auto: as many as memory and cores allow; or a number",
    output="folder of the kernels; build and server must see it under the same path",
    python="interpreter of the environment that serves, with the patched FlashInfer",
)
def build_kernels(
    _ctx: Context,
    set: str = "gpt-oss",  # noqa: A002 (the flag's name)
    arch: str = "12.1a",
    jobs: str = "auto",
    output: str = "",
    python: str = "",
) -> None:
    """Compile FlashInfer's modules ahead of time, without a GPU, and audit them."""
    room("forge.kernels").show(set, arch, jobs, output, python)


@verb(
    sources="folder of an unpacked bundle, or with a git checkout for each repository; default: the network",
    jobs="auto: as many as memory and cores allow; or a number",
    arch="12.1a: the DGX Spark's; vLLM's CMake files make 12.0 and 12.0f of it",
    python="interpreter with torch and CUDA to compile against; default: one of our own",
    output="folder of the overlay",
    targets="CMake targets with commas; default: all that SM121 uses",
    into="site-packages that has upstream's wheel: lay the overlay over it",
)
def build_vllm(
    _ctx: Context,
    sources: str = "",
    jobs: str = "auto",
    arch: str = "12.1a",
    python: str = "",
    output: str = "",
    targets: str = "",
    into: str = "",
) -> None:
    """Compile vLLM's own extensions for SM121, without a GPU, audit them, and make an overlay for upstream's wheel."""
    overlay = room("forge.vllm_build").show(targets, sources, jobs, arch, python, output)
    if into:
        room("forge.vllm_overlay").show_put(overlay, into)


@verb(
    paths="files or folders: .cubin, .o, .so, .whl; several with commas",
    module="modules that must be there, with commas",
    machine="x86_64 or aarch64, that the files must be for",
    output="JSON file for the whole report",
)
def audit(_ctx: Context, paths: str, module: str = "", machine: str = "", output: str = "") -> None:
    """Read what binaries really hold for SM121, kernel by kernel, and refuse what breaks a rule."""
    places = [Path(path) for path in listed(paths)]
    room("forge.audit").show(places, modules=listed(module), machine=machine, output=Path(output) if output else None)


@verb(root=ROOT)
def cache(_ctx: Context, root: str = "") -> None:
    """List the compiled FlashInfer modules, their sizes, and what a rebuild of each costs."""
    room("forge.cache").show(room("forge.pins").load(), root=Path(root) if root else None)


@verb(
    module="modules to remove, with commas",
    changed="changed source files, with commas: remove the modules built from them",
    stale="remove what other versions left",
    all="remove every module; asks first",
    dry_run=DRY_RUN,
    yes="do not ask",
    root=ROOT,
)
def clean_cache(
    _ctx: Context,
    module: str = "",
    changed: str = "",
    stale: bool = False,
    all: bool = False,  # noqa: A002 (the flag's name)
    dry_run: bool = False,
    yes: bool = False,
    root: str = "",
) -> None:
    """Remove compiled FlashInfer modules; never one that a live process uses."""
    room("forge.cache").clean(
        pins=room("forge.pins").load(),
        names=listed(module),
        changed=[Path(path) for path in listed(changed)],
        stale=stale,
        everything=all,
        dry_run=dry_run,
        yes=yes,
        root=Path(root) if root else None,
    )
