"""Commands that fetch, patch, compile, audit and pack."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from invoke.context import Context

from sparkforge.cli.command import DEFAULT_STACK, arguments, caller_path, caller_paths, listed, task
from sparkforge.core.console import Steps, say
from sparkforge.core.errors import UsageError

OFFLINE = "folder of an unpacked bundle: use it instead of the network"
STACK = f"a stack of pins.toml (default: {DEFAULT_STACK})"
TREE = "a folder with unpatched sources, in place of the pinned archives"
UPSTREAM = "such as vllm or flashinfer"
DRY_RUN = "print what would be done, change nothing"
JOBS = "auto: as many as memory and cores allow; or a number [BUILD_JOBS, JOBS or MAX_JOBS]"
JOBS_VARIABLES = ("BUILD_JOBS", "JOBS", "MAX_JOBS")  # as in deploy/stacks.yml
IMAGE = "an image's name, if it is not the stack's"


def chosen_stack(name: str) -> str:
    """Return the stack that a user named, on the command line or by SPARKFORGE_STACK, or the default one."""
    from sparkforge import pins

    return name or os.environ.get("SPARKFORGE_STACK") or pins.load().default


def chosen_jobs(jobs: str) -> str:
    """Return how many compilers a user wants at once: by the option, or by the first of JOBS_VARIABLES that is set.

    Raises UsageError for a variable that is no number.
    """
    if jobs != "auto":
        return jobs
    name = next((name for name in JOBS_VARIABLES if os.environ.get(name)), "")
    text = os.environ.get(name, "auto") if name else "auto"
    if text != "auto" and not (text.isascii() and text.isdecimal() and 0 < int(text) < 10_000):
        raise UsageError(f"{name} is {text[:40]!r}", "it takes auto or 1, 2, …", f"unset {name}; or --jobs 4")
    return text


def build_image(stack: str, steps: Steps, *, way: str = "wheel", jobs: str = "auto") -> None:
    """Build a stack's image through Compose."""
    from sparkforge.image import versions
    from sparkforge.image.build import build
    from sparkforge.image.inspect import ready_to_build

    command = ready_to_build(stack)
    with versions.named(stack):
        build(command, stack=stack, steps=steps, way=way, jobs=chosen_jobs(jobs))


@task(
    example="./inv build --engine docker",
    engine="native, or docker: the stack's container image",
    from_="wheel: upstream's vLLM with patched Python; source: vLLM's own extensions compiled",
    jobs=JOBS,
    python="native: interpreter that serves, which the kernels are for",
    compile_python="native, from source: interpreter with torch and CUDA to compile against",
    sources="native, from source: folder of an unpacked bundle, or of git checkouts",
    stack=STACK,
)
def build(
    _ctx: Context,
    engine: str = "native",
    from_: str = "wheel",
    jobs: str = "auto",
    python: str = "",
    compile_python: str = "",
    sources: str = "",
    stack: str = "",
) -> None:
    """Fetch, patch, compile and audit everything.

    A stage whose inputs are unchanged does nothing.
    """
    if engine == "native":
        from sparkforge.image import native

        native.build(
            native.BuildRequest(
                stack=chosen_stack(stack),
                way=from_,
                jobs=chosen_jobs(jobs),
                python=caller_path(python),
                compile_python=caller_path(compile_python),
                sources=caller_path(sources),
            )
        )
    elif engine == "docker":
        build_image(chosen_stack(stack), Steps(1), way=from_, jobs=jobs)
    else:
        raise UsageError(f"--engine {engine!r} is not known", "there are native and docker", "./inv build --help")


@task(
    example="./inv build.sources --stack spark",
    stack=STACK,
    no_git="leave out what upstream's builds fetch by git",
    offline=OFFLINE,
)
def build_sources(_ctx: Context, stack: str = "", no_git: bool = False, offline: str = "") -> None:
    """Fetch, check and unpack every source that a build needs."""
    from sparkforge.sources import offline as bundles
    from sparkforge.sources import trees

    bundles.use_bundle(caller_path(offline))
    trees.print_sources(chosen_stack(stack), git=not no_git)


@task(example="./inv build.toolchain")
def build_toolchain(_ctx: Context) -> None:
    """Find or install the compilers for 12.1a.

    Prints their paths and versions.
    """
    from sparkforge.compile import toolchain

    toolchain.print_toolchain()


@task(
    example="./inv build.kernels --set gpt-oss",
    set="a set of the stack's kernel table, such as gpt-oss, or all; default: the image's",
    arch="12.1a: the DGX Spark's; default: the image's",
    jobs=JOBS,
    output="folder of the kernels; build and server must see it under the same path",
    python="interpreter of the environment that serves, with the patched FlashInfer",
    stack=STACK,
)
def build_kernels(
    _ctx: Context,
    set: str = "",  # noqa: A002 - the option's name
    arch: str = "",
    jobs: str = "auto",
    output: str = "",
    python: str = "",
    stack: str = "",
) -> None:
    """Compile and audit FlashInfer's modules, without a GPU."""
    from sparkforge.compile.flashinfer import build

    build.build_kernels(
        chosen_stack(stack),
        set_name=set,
        arch=arch,
        jobs=chosen_jobs(jobs),
        output=caller_path(output),
        python=caller_path(python),
    )


@task(
    example="./inv build.vllm --targets _C",
    sources="folder of an unpacked bundle, or with a git checkout for each repository; default: the network",
    jobs=JOBS,
    arch="12.1a: the DGX Spark's; vLLM's CMake files make 12.0 and 12.0f of it; default: the image's",
    python="interpreter with torch and CUDA to compile against; default: one of our own",
    output="folder of the overlay",
    targets="CMake targets with commas; default: all that SM121 uses",
    into="site-packages with upstream's wheel: install the overlay over it",
    stack=STACK,
)
def build_vllm(
    _ctx: Context,
    sources: str = "",
    jobs: str = "auto",
    arch: str = "",
    python: str = "",
    output: str = "",
    targets: str = "",
    into: str = "",
    stack: str = "",
) -> None:
    """Compile and audit vLLM's own extensions, without a GPU."""
    from sparkforge.compile.vllm import build, overlay

    folder = build.build_extensions(
        build.ExtensionRequest(
            chosen_stack(stack),
            targets=targets,
            sources=caller_path(sources),
            jobs=chosen_jobs(jobs),
            arch=arch,
            python=caller_path(python),
            output=caller_path(output),
        )
    )
    if into:
        overlay.install_overlay(folder, caller_path(into))


@task(
    example="./inv patch --machine aarch64",
    stack=STACK,
    machine="x86_64 or aarch64: the wheels for it; default: this machine's",
    lock="write the hashes of all that the stack's queues make to locks/patched.toml",
    dry_run="compare with the lock, keep nothing",
)
def patch_make(_ctx: Context, stack: str = "", machine: str = "", lock: bool = False, dry_run: bool = False) -> None:
    """Make a stack's patched wheels and compare them with the lock.

    A wheel whose hash is not that of locks/patched.toml is refused.
    """
    from sparkforge.patching import wheels

    if lock and (machine or dry_run):
        raise UsageError(
            "--lock is for every machine", "it goes with no other option but --stack", "./inv patch --lock"
        )
    if lock:
        wheels.lock_stack(chosen_stack(stack))
    else:
        wheels.make_stack(chosen_stack(stack), machine, dry_run=dry_run)


@task(
    example="./inv patch.status --against 0.33.0",
    stack=STACK,
    against="another release: 0.33.0 is vLLM's, else flashinfer-0.7.2.post1",
    tree=TREE,
)
def patch_status(_ctx: Context, stack: str = "", against: str = "", tree: str = "") -> None:
    """Print whether each patch applies to a release.

    A patch applies, applies with offset, is already upstream, or conflicts.
    """
    from sparkforge.patching import status

    status.print_status(chosen_stack(stack), against, caller_path(tree))


@task(
    example="./inv patch.new fix-routing --from ~/vllm",
    name="the patch's name, which its file will have",
    stack=STACK,
    upstream=UPSTREAM,
    from_="a checkout with the queue (dev.patch): everything in it beyond the queue is the patch",
    commit="with --from: this commit alone; its message is the description",
    finish="write the patch from the scratch copy that the command made without --from",
    description="what it does and why",
    bug="URL of the report",
    drop_when="when it can go: contains PATH TEXT, or lacks PATH TEXT",
)
def patch_new(  # noqa: PLR0913, PLR0917 - one parameter an option
    _ctx: Context,
    name: str,
    stack: str = "",
    upstream: str = "vllm",
    from_: str = "",
    commit: str = "",
    finish: bool = False,
    description: str = "",
    bug: str = "",
    drop_when: str = "",
) -> None:
    """Write a patch from a checkout, or make a scratch copy to edit."""
    from sparkforge.patching import authoring

    header = {"description": description, "bug": bug, "drop_when": drop_when}
    fields = {key: text for key, text in header.items() if text}
    authoring.new_patch(
        name, fields, stack=chosen_stack(stack), of=upstream, source=caller_path(from_), commit=commit, finish=finish
    )


@task(
    example="./inv patch.rebase 0.33.0",
    to="the version to carry it to",
    stack=STACK,
    drop="numbers of patches to leave behind, with commas",
    continue_="go on after you have resolved the conflicts",
)
def patch_rebase(_ctx: Context, to: str, stack: str = "", drop: str = "", continue_: bool = False) -> None:
    """Carry a queue over to another release.

    The new queue is written into a folder of its own.
    """
    from sparkforge.patching import rebase

    rebase.rebase_queue(to, chosen_stack(stack), drop, resume=continue_)


@task(example="./inv dev.patch ~/vllm", directory="a clone of vLLM or FlashInfer, at the pinned version", stack=STACK)
def dev_patch(_ctx: Context, directory: str, stack: str = "") -> None:
    """Put the patch queue into a git checkout, as commits."""
    from sparkforge import pins
    from sparkforge.patching import checkout

    say(checkout.commit_to_checkout(pins.load(), chosen_stack(stack), Path(caller_path(directory))))


@task(
    example="./inv dev.build vllm --units changed",
    name="vllm or flashinfer",
    targets="vllm: CMake targets with commas; default: all that SM121 uses",
    units="vllm: compile and audit source files alone, with commas and *, or `changed`: what you edited; links nothing",
    set="flashinfer: a set of the stack's kernel table; default: the image's",
    sources="vllm: folder of an unpacked bundle, or with a git checkout for each repository; default: the network",
    jobs=JOBS,
    accept="compile nothing: note that what you compiled yourself is made from the sources as they are",
    stack=STACK,
)
def dev_build(
    _ctx: Context,
    name: str,
    targets: str = "",
    set: str = "",  # noqa: A002 - the option's name
    sources: str = "",
    jobs: str = "auto",
    accept: bool = False,
    stack: str = "",
    units: str = "",
) -> None:
    """Compile a mounted checkout in the development container.

    Within the job planner's memory bound, for the stack's architecture. Says what was compiled and where it lies.
    """
    from sparkforge.image import dev

    options = dev.BuildOptions(targets, set, caller_path(sources), chosen_jobs(jobs), accept, units)
    dev.build(name, chosen_stack(stack), options)


@task(
    example="./inv audit .sparkforge/kernels --machine aarch64",
    paths="files or folders: .cubin, .o, .so, .whl; several with commas",
    module="modules that must be there, with commas",
    machine="x86_64 or aarch64, that the files must be for",
    output="JSON file for the whole report",
)
def audit(_ctx: Context, paths: str, module: str = "", machine: str = "", output: str = "") -> None:
    """Check which kernels binaries hold for SM121.

    Reads the machine code, kernel by kernel, and refuses what breaks a rule.
    """
    from sparkforge.audit.report import run_audit
    from sparkforge.compile import toolchain

    run_audit(
        caller_paths(paths),
        tools=toolchain.audit_tools,
        modules=listed(module),
        machine=machine,
        output=Path(caller_path(output)) if output else None,
        foreign=True,
    )


@task(example="./inv image.inspect --stack embedded", stack=STACK, image=IMAGE)
def image_inspect(_ctx: Context, stack: str = "", image: str = "") -> None:
    """Print an image's labels, digests, provenance and layers."""
    from sparkforge.image.inspect import inspect

    inspect(chosen_stack(stack), image)


@task(example="./inv image.verify", stack=STACK, image=IMAGE)
def image_verify(_ctx: Context, stack: str = "", image: str = "") -> None:
    """Check that an image was built from this checkout.

    Its patches and locks must be those of the checkout.
    """
    from sparkforge.image.build import expected
    from sparkforge.image.inspect import verify

    verify(chosen_stack(stack), image, partial(expected, stack=chosen_stack(stack)))


@task(
    example="./inv image.reproduce --stack embedded",
    stack=STACK,
    more="more arguments for docker buildx build, such as --build-context NAME=PLACE",
)
def image_reproduce(_ctx: Context, stack: str = "", more: str = "") -> None:
    """Build an image twice and compare the bytes."""
    from sparkforge.image.reproducible import verify_reproducible

    verify_reproducible(chosen_stack(stack), arguments("--more", more))


@task(
    example="./inv image.publish registry.example.com/sparkforge/vllm",
    repository="the registry's host and the repository, without a tag",
    stack=STACK,
    image=IMAGE,
    output="the record's file; default: below .sparkforge/published",
)
def image_publish(_ctx: Context, repository: str, stack: str = "", image: str = "", output: str = "") -> None:
    """Push an image to a registry.

    Prints its digest, by which `image.pull` gets it. `docker login` gives the credentials.
    """
    from sparkforge.image import registry
    from sparkforge.image.build import expected

    chosen = chosen_stack(stack)
    file = Path(caller_path(output)) if output else None
    registry.publish(chosen, image, repository, partial(expected, stack=chosen), file)


@task(
    example="./inv image.pull registry.example.com/sparkforge/vllm@sha256:…",
    source="REPOSITORY@sha256:DIGEST, or the record that image.publish wrote",
    stack=STACK,
)
def image_pull(_ctx: Context, source: str, stack: str = "") -> None:
    """Pull an image by digest in place of building it.

    It is checked against this checkout before Compose serves it; a wrong one is removed again.
    """
    from sparkforge.image import registry
    from sparkforge.image.build import expected

    chosen = chosen_stack(stack)
    registry.pull(chosen, source, partial(expected, stack=chosen), Path(caller_path(".")))


@task(example="./inv image.list", stack=STACK)
def image_list(_ctx: Context, stack: str = "") -> None:
    """List a stack's images on this machine with their sizes."""
    from sparkforge.image import versions
    from sparkforge.serve import known_good

    versions.list_images(chosen_stack(stack), known_good.images())


@task(
    example="./inv image.clean --keep 1 --dry-run",
    stack=STACK,
    keep="how many old images stay; default 3 [SPARKFORGE_KEEP_IMAGES]",
    dry_run=DRY_RUN,
)
def image_clean(_ctx: Context, stack: str = "", keep: str = "", dry_run: bool = False) -> None:
    """Remove a stack's old images.

    Never one that a container uses, that Compose would serve, or that a known good start has.
    """
    from sparkforge.image import versions
    from sparkforge.serve import known_good

    versions.clean(chosen_stack(stack), versions.kept_number(keep), known_good.images(), dry_run=dry_run)
