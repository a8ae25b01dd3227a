"""Commands that fetch, patch, compile, audit and pack."""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from invoke.context import Context

from sparkforge.cli.command import DEFAULT_STACK, caller_path, caller_paths, listed, option, task
from sparkforge.core.console import Steps, echo
from sparkforge.core.errors import UsageError
from sparkforge.core.files import write_atomic

if TYPE_CHECKING:
    from sparkforge.image.build import ImageOptions

OFFLINE = "folder of an unpacked bundle: use it instead of the network"
STACK = f"a stack of pins.toml (default: {DEFAULT_STACK})"
PACKS = "where kernel packs are: a .tar, a folder or a repository [SPARKFORGE_PACKS]"
DRY_RUN = "print what would be done, change nothing"
JOBS = "auto: as many as memory and cores allow; or a number [BUILD_JOBS, JOBS or MAX_JOBS]"
JOBS_VARIABLES = ("BUILD_JOBS", "JOBS", "MAX_JOBS")  # as in deploy/stacks.yml
IMAGE = "an image's name, if it is not the stack's; or the path of an OCI layout, a folder or .tar"


def chosen_stack(name: str) -> str:
    """Return the stack of the command line or SPARKFORGE_STACK, or the default one. Raises InputError if unknown."""
    from sparkforge import pins

    table = pins.load()
    chosen = name or os.environ.get("SPARKFORGE_STACK") or table.default
    table.stack(chosen)
    return chosen


def chosen_jobs(jobs: str) -> str:
    """Return the number of compilers at once, or auto: from --jobs, else from JOBS_VARIABLES. Raises UsageError."""
    name = "--jobs" if jobs != "auto" else next((name for name in JOBS_VARIABLES if os.environ.get(name)), "")
    text = jobs if jobs != "auto" else os.environ.get(name) or "auto"
    if text != "auto" and not (text.isascii() and text.isdecimal() and len(text) < 5 and int(text) > 0):
        fix = "--jobs auto" if name == "--jobs" else f"unset {name}   # or --jobs 4"
        raise UsageError(f"{name} is {text[:40]!r}", "it takes auto or 1, 2, …", fix)
    return text


def image_path(name: str) -> str:
    """Return a user's path as an absolute path; return the name of an image or a repository unchanged.

    Raises UsageError for an unknown option, because Invoke parses it as a name.
    """
    if name.startswith("-"):
        raise UsageError(f"there is no option {name[:40]}", "its options are in --help", "--help")
    return caller_path(name) if name.startswith(("/", ".", "~")) or name.endswith(".tar") else name


def program_path(flag: str, text: str) -> str:
    """Return the absolute path of an interpreter on the command line, empty for none. Raises UsageError."""
    path = caller_path(text)
    if path and not (Path(path).is_file() and os.access(path, os.X_OK)):
        raise UsageError(f"{flag} {text[:80]!r} is not an interpreter", "it is not a program", f"without {flag}")
    return path


def build_image(stack: str, steps: Steps, options: ImageOptions | None = None) -> None:
    """Build a stack's image through Compose. With `options.platform` it does not get the tags that Compose serves."""
    from sparkforge.image import versions
    from sparkforge.image.build import ImageOptions, build
    from sparkforge.image.inspect import ready_to_build

    command, options = ready_to_build(stack), options or ImageOptions()
    with nullcontext() if options.platform else versions.named(stack):
        build(command, stack, replace(options, jobs=chosen_jobs(options.jobs)), steps)


@dataclass(frozen=True)
class BuildOptions:
    """Options of `./inv build`."""

    engine: str = option("native, or docker: the stack's container image", "native")
    from_: str = option("wheel: upstream's vLLM, Python files patched; source: also compile its extensions", "wheel")
    only: str = option("native: only one part: sources (also those from git), or toolchain (the compilers)")
    jobs: str = option(JOBS, "auto")
    python: str = option("native: interpreter of the server that uses the kernels")
    compile_python: str = option("native, from source: interpreter with torch and CUDA to compile against")
    sources: str = option("native: folder used instead of the network: an unpacked bundle, or one of git checkouts")
    packs: str = option(PACKS)
    platform: str = option("docker: platform of the image, such as linux/arm64; default: the engine's")
    reproducible: bool = option("docker: give files the commit's time, so that another build is identical", False)
    stack: str = option(STACK)


@task(example="./inv build --engine docker", options=BuildOptions)
def build(_ctx: Context, options: BuildOptions) -> None:
    """Fetch, patch, compile and audit everything.

    A stage whose inputs are unchanged does nothing.
    """
    from sparkforge.image.devices import machine_of

    if options.only and (options.engine != "native" or options.only not in ("sources", "toolchain")):
        why = "native builds have the parts sources and toolchain"
        raise UsageError(f"--only {options.only} does not go with --engine {options.engine}", why, "./inv build --help")
    build_for = "./inv build --engine docker --platform"
    machine_of(options.platform, build_for)  # refuses an unknown platform
    if options.platform and options.engine != "docker":
        fix = f"{build_for} {shlex.quote(options.platform)}"
        raise UsageError("--platform is for images", "a native build is for this machine", fix)
    stack, sources = chosen_stack(options.stack), caller_path(options.sources)
    if sources and not Path(sources).is_dir():
        failure = f"--sources {options.sources[:80]!r} is not a folder"
        raise UsageError(failure, "there is no such folder", "without --sources")
    if options.only == "sources":
        from sparkforge.sources import offline, trees

        offline.use_bundle(sources)
        trees.print_sources(stack, git=True)
    elif options.only == "toolchain":
        from sparkforge.compile import toolchain

        toolchain.print_toolchain()
    elif options.engine == "native":
        from sparkforge.compile import stages
        from sparkforge.image import packs

        stages.build(
            stages.BuildRequest(
                stack=stack,
                way=options.from_,
                jobs=chosen_jobs(options.jobs),
                python=program_path("--python", options.python),
                compile_python=program_path("--compile-python", options.compile_python),
                sources=sources,
                take=packs.taking(image_path(options.packs)),
            )
        )
    elif options.engine == "docker":
        from sparkforge.image.build import ImageOptions

        packs_place = image_path(options.packs)
        image = ImageOptions(options.from_, options.jobs, packs_place, options.platform, options.reproducible)
        build_image(stack, Steps(1), image)
    else:
        raise UsageError(f"--engine {options.engine!r} is not known", "choose native or docker", "./inv build --help")


@dataclass(frozen=True)
class KernelOptions:
    """Options of `./inv build.kernels`."""

    set: str = option("a set of the stack's kernel table, such as gpt-oss, or all; default: the image's")
    arch: str = option("architecture, such as 12.1a (DGX Spark); default: the image's")
    jobs: str = option(JOBS, "auto")
    output: str = option("folder of the kernels; build and server must see it under the same path")
    python: str = option("interpreter of the environment that serves, with the patched FlashInfer")
    platform: str = option("platform of the modules, such as linux/arm64; default: this machine's")
    packs: str = option(PACKS)
    publish: str = option("folder or repository to store the modules in, as a kernel pack")
    key: str = option("with --publish: sign the pack with this key, as image.sign does")
    stack: str = option(STACK)


@task(example="./inv build.kernels --publish registry.example.com/sparkforge/kernels", options=KernelOptions)
def build_kernels(_ctx: Context, options: KernelOptions) -> None:
    """Compile and audit FlashInfer's modules, without a GPU."""
    from sparkforge.compile.flashinfer.build import KernelRequest, build_kernels
    from sparkforge.image import devices, packs, signing

    machine = devices.machine_of(options.platform, "./inv build.kernels --platform")
    key_file = Path(caller_path(options.key)) if options.key else None
    if key_file and not options.publish:
        fix = "without --key"
        raise UsageError("--key has no meaning here", "it signs the pack of --publish", fix)
    if key_file:
        signing.private_key(key_file)  # refuse a bad key before minutes of work
    request = KernelRequest(
        chosen_stack(options.stack),
        options.set,
        options.arch,
        chosen_jobs(options.jobs),
        output=caller_path(options.output),
        python=program_path("--python", options.python),
        take=packs.taking(image_path(options.packs)),
        machine=machine,
    )
    build_kernels(request)
    if options.publish:
        packs.publish(request, image_path(options.publish), key_file)


@task(
    example="./inv patch --machine aarch64",
    stack=STACK,
    machine="machine of the wheels, x86_64 or aarch64; default: this one",
    dry_run="compare with the lock, keep nothing",
)
def patch_make(_ctx: Context, stack: str = "", machine: str = "", dry_run: bool = False) -> None:
    """Make a stack's patched wheels and compare them with the lock.

    A wheel whose hash is not that of locks/patched.toml is refused.
    """
    from sparkforge.patching import wheels
    from sparkforge.pins.wheels import MACHINES

    if machine and machine not in MACHINES:
        why, fix = f"it takes {' or '.join(MACHINES)}", f"--machine {MACHINES[0]}"
        raise UsageError(f"--machine {machine[:40]!r} is not known", why, fix)
    wheels.make_stack(chosen_stack(stack), machine, dry_run=dry_run)


@dataclass(frozen=True)
class DevelopmentOptions:
    """Options of `./inv dev.build`."""

    targets: str = option("vllm: CMake targets, comma-separated; default: all that SM121 uses")
    set: str = option("flashinfer: a set of the stack's kernel table; default: the image's")
    sources: str = option(
        "vllm: folder of an unpacked bundle, or with a git checkout for each repository; default: the network"
    )
    jobs: str = option(JOBS, "auto")
    accept: bool = option("compile nothing: record that your own build was made from the present sources", False)
    stack: str = option(STACK)
    units: str = option(
        "vllm: compile and audit only these files: comma-separated patterns, or `changed` for those that you edited"
    )


@task(example="./inv dev.build vllm --units changed", options=DevelopmentOptions, name="vllm or flashinfer")
def dev_build(_ctx: Context, options: DevelopmentOptions, name: str) -> None:
    """Compile a mounted checkout in the development container.

    It stays within the job planner's memory bound, compiles for the stack's architecture, and prints the results'
    paths.
    """
    from sparkforge.image import dev

    asked = dev.BuildOptions(
        options.targets, options.set, caller_path(options.sources), chosen_jobs(options.jobs), options.accept,
        options.units,
    )  # fmt: skip
    dev.build(name, chosen_stack(options.stack), asked)


@task(
    example="./inv audit .sparkforge/kernels --machine aarch64",
    paths="files or folders: .cubin, .o, .so, .whl; comma-separated",
    module="modules that must be present, comma-separated",
    machine="machine that the files must be for: x86_64 or aarch64",
    output="JSON file for the whole report",
)
def audit(_ctx: Context, paths: str, module: str = "", machine: str = "", output: str = "") -> None:
    """Check the SM121 kernels in binaries.

    It reads the machine code, kernel by kernel, and fails if a rule is broken.
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


@task(example="./inv image.verify --stack embedded", stack=STACK, image=IMAGE)
def image_verify(_ctx: Context, stack: str = "", image: str = "") -> None:
    """Check that an image was made from this checkout.

    It prints the image's digests and inputs. Patches and locks must be those of the checkout, and the image must have
    the signatures that trust.toml requires.
    """
    from sparkforge.image import inspect, trust
    from sparkforge.image.build import expected

    chosen = chosen_stack(stack)
    inspect.verify(chosen, image_path(image), partial(expected, stack=chosen))
    trust.print_trust(chosen, image_path(image))


@task(
    example="./inv image.sbom --output spark.cdx.json",
    optional="image",
    image=IMAGE,
    stack=STACK,
    output="file to write; default: stdout",
    licences="print every licence and its text instead",
    check_vulnerabilities="compare it with OSV's records instead: a .zip, .json or folder",
)
def image_sbom(
    _ctx: Context,
    image: str,
    stack: str = "",
    output: str = "",
    licences: bool = False,
    check_vulnerabilities: str = "",
) -> None:
    """Print an image's bill of materials, CycloneDX 1.6.

    It lists every package with version, licence, source and hash, our patches, and the machine code of each kernel
    module.
    """
    from sparkforge.image import inspect, vulnerabilities

    chosen = chosen_stack(stack)
    with inspect.opened(chosen, image_path(image)) as opened:
        text = (inspect.licence_report if licences else inspect.bill)(opened, chosen)
    if check_vulnerabilities:
        vulnerabilities.check(text, Path(caller_path(check_vulnerabilities)))
        return
    if output:
        write_atomic(Path(caller_path(output)), text)
    else:
        echo(text.decode().rstrip())


@task(
    example="./inv image.sign ~/sparkforge.pem",
    key="file with an Ed25519 key in PEM that only you can read",
    image=IMAGE,
    builder="URI of the builder, for the image's provenance; default: your own build",
    folder="an OCI layout for the signatures, made if it is missing, in place of the image's registry",
    stack=STACK,
)
def image_sign(_ctx: Context, key: str, image: str = "", builder: str = "", folder: str = "", stack: str = "") -> None:
    """Sign an image, its provenance and its bill of materials.

    The image must be this checkout's. The signatures are stored with it in its registry, if it was pushed to one.
    """
    from sparkforge.image import signing
    from sparkforge.image.build import expected

    if not key:
        raise UsageError("KEY names no file", "it is an Ed25519 key in PEM", "--help")
    chosen = chosen_stack(stack)
    place = Path(caller_path(folder)) if folder else None
    key_file = Path(caller_path(key))
    signing.sign(chosen, image_path(image), partial(expected, stack=chosen), key_file, builder, place)


@task(
    example="./inv image.publish registry.example.com/sparkforge/vllm",
    repository="the registry's host and the repository, without a tag",
    stack=STACK,
    image=IMAGE,
    packs="push the kernel packs in this folder instead of an image",
)
def image_publish(_ctx: Context, repository: str, stack: str = "", image: str = "", packs: str = "") -> None:
    """Push an image to a registry.

    Prints its digest, by which `image.pull` gets it. `docker login` gives the credentials.
    """
    from sparkforge.image import packs as kernel_packs
    from sparkforge.image import registry
    from sparkforge.image.build import expected

    if packs:
        kernel_packs.copy(Path(caller_path(packs)), repository)
        return
    chosen = chosen_stack(stack)
    registry.publish(chosen, image, repository, partial(expected, stack=chosen))


@task(
    example="./inv image.pull registry.example.com/sparkforge/vllm@sha256:…",
    reference="REPOSITORY@sha256:DIGEST, as image.publish prints it",
    stack=STACK,
)
def image_pull(_ctx: Context, reference: str, stack: str = "") -> None:
    """Pull an image by digest in place of building it.

    It is checked against this checkout before Compose serves it; if it does not match, it is removed again.
    """
    from sparkforge.image import registry
    from sparkforge.image.build import expected

    chosen = chosen_stack(stack)
    registry.pull(chosen, reference, partial(expected, stack=chosen))
