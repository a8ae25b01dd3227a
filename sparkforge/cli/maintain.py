"""Commands that keep a checkout and its caches in order: caches, bundles, pins, tests, documentation."""

from dataclasses import dataclass
from pathlib import Path

from invoke.context import Context
from invoke.exceptions import Exit

from sparkforge.cli.build import DRY_RUN, STACK, chosen_stack
from sparkforge.cli.command import caller_path, caller_paths, in_laboratory, listed, option, task
from sparkforge.core.errors import UsageError
from sparkforge.core.files import write_atomic


@dataclass(frozen=True)
class CleanOptions:
    """Options of `./inv clean-cache`."""

    module: str = option("modules to remove, comma-separated, such as 'fused_moe_*'")
    changed: str = option("changed source files, comma-separated: remove the modules built from them")
    stale: bool = option("remove modules of other versions", False)
    all_: bool = option("remove every module; asks first", False)
    list_: bool = option("only list the modules, their sizes, and what uses them", False)
    dry_run: bool = option(DRY_RUN, False)
    yes: bool = option("do not ask", False)
    root: str = option("the cache's folder, if it is not FlashInfer's own")
    container: bool = option("the container's cache, which is in the volume of this checkout's Compose project", False)


@task(example="./inv clean-cache --stale --dry-run", options=CleanOptions)
def clean_cache(_ctx: Context, options: CleanOptions) -> None:
    """Remove compiled FlashInfer modules.

    A module that a live process uses stays.
    """
    only_list = CleanOptions(list_=True, root=options.root, container=options.container)
    if options.list_ and options != only_list:
        why = "it removes nothing, and takes only --root or --container"
        raise UsageError("--list cannot be combined with these options", why, "./inv clean-cache --list")
    if options.container:
        from sparkforge.image import volume

        if options.changed or options.root:
            why, fix = "the container has other paths", "./inv clean-cache --container --module 'fused_moe_*'"
            raise UsageError("--container cannot be combined with --changed and --root", why, fix)
        flags = {"--stale": options.stale, "--all": options.all_, "--dry-run": options.dry_run, "--yes": options.yes}
        arguments = ["--module", options.module] if options.module else []
        arguments += [name for name, chosen in flags.items() if chosen]
        if code := volume.run_cache("list") if options.list_ else volume.run_cache("clean", *arguments):
            raise Exit(code=code)  # the program in the container has printed the error
        return
    from sparkforge.compile import cache

    folder = Path(caller_path(options.root)) if options.root else None
    if folder and not folder.is_dir():
        raise UsageError(f"there is no cache {folder}", "it is no folder", "./inv clean-cache --list")
    if options.list_:
        cache.print_cache(folder)
        return
    modules, changed = listed(options.module), caller_paths(options.changed)
    selection = cache.Selection(modules, changed, stale=options.stale, everything=options.all_)
    cache.clean(selection, dry_run=options.dry_run, yes=options.yes, root=folder)


@task(
    example="./inv bundle --output spark.tar --more spark",
    output="the file to write",
    stack=STACK,
    machine="x86_64 or aarch64; default: this one",
    python="such as 3.12; default: this one",
    more="more locks, comma-separated, such as spark",
    key="sign it with this key, as image.sign does, into OUTPUT.sig",
)
def bundle_make(
    _ctx: Context,
    output: str = "sparkforge-bundle.tar",
    stack: str = "",
    machine: str = "",
    python: str = "",
    more: str = "",
    key: str = "",
) -> None:
    """Pack everything for a machine without a network.

    A bundle holds sources, wheels, patches, the vocabulary and kernel packs; OUTPUT.cdx.json is its bill of materials.
    """
    from sparkforge import pins
    from sparkforge.image import sbom, signing
    from sparkforge.sources import bundle

    file, chosen, key_file = Path(caller_path(output)), chosen_stack(stack), Path(caller_path(key))
    if key:
        signing.private_key(key_file)  # refuse a bad key before minutes of work
    sha256 = bundle.make_and_report(file, stack=chosen, machine=machine, python=python, more=listed(more))
    bill = sbom.of_bundle(file, chosen, pins.load())
    write_atomic(file.with_name(f"{file.name}.cdx.json"), bill)
    if key:
        signing.sign_bundle(file, sha256, bill, key_file)


@task(
    example="./inv bundle.unpack spark.tar /srv/bundle --sha256 0123…",
    file="the bundle",
    folder="folder for its members",
    sha256="sha256 of the bundle, as `./inv bundle` printed it",
)
def bundle_unpack(_ctx: Context, file: str, folder: str, sha256: str = "") -> None:
    """Unpack a bundle; verify each member, and the signature that trust.toml requires."""
    from sparkforge.image import trust
    from sparkforge.sources import bundle

    path = Path(caller_path(file))
    signed = trust.require_file(path) if path.is_file() else ""
    bundle.unpack(path, Path(caller_path(folder)), sha256=sha256 or signed)


@task(example="./inv pins.lock")
def pins_lock(_ctx: Context) -> None:
    """Resolve every locks/*.in and write its hash-locked set."""
    in_laboratory("locks")


@task(
    example="./inv test --fast --select patch",
    all_="also tests marked nightly: `./inv up` itself, builds of vLLM, other releases",
    fast="unit tests that need neither vLLM nor torch: offline, minutes",
    select="pytest's -k expression",
    coverage="measure which lines the tests reach, and print the table",
    robustness="only the robustness tests: hostile requests, failing disks, kills, races, malformed input",
    minutes="minutes of --robustness; default 60",
)
def test(
    _ctx: Context,
    all_: bool = False,
    fast: bool = False,
    select: str = "",
    coverage: bool = False,
    robustness: bool = False,
    minutes: str = "",
) -> None:
    """Run the tests in an environment of their own."""
    flags = {"--all": all_, "--fast": fast, "--coverage": coverage, "--robustness": robustness}
    texts = {"--select": select, "--minutes": minutes}
    words = [*(name for name, given in flags.items() if given), *(f"{name}={text}" for name, text in texts.items())]
    in_laboratory("suite", *words)


@task(example="./inv check", docs="only build the documentation, into .sparkforge/site; a broken link is an error")
def check(_ctx: Context, docs: bool = False) -> None:
    """Run every linter, mypy and the import contracts.

    It needs neither vLLM nor torch. With --docs it builds the documentation.
    """
    in_laboratory("check", *(["--docs"] if docs else []))
