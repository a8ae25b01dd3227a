"""Sparkforge's commands. Each is a thin Invoke task: its docstring is the help, the rooms do the work."""

from importlib import import_module as room  # a room is loaded only by the task that needs it
from pathlib import Path

from invoke.collection import Collection
from invoke.context import Context

from sparkforge.command import verb, whole_number
from sparkforge.console import Steps, say

OFFLINE = "folder of an unpacked bundle: use it instead of the network"
STACK, TREE = "a stack of pins.toml", "a tree to work on; default: the stack's unpacked sources"
UPSTREAM, DRY_RUN = "such as vllm or flashinfer", "say what would be done, change nothing"


@verb(
    device="auto, embedded (vLLM's CPU build) or docker",
    model="folder of a gpt-oss checkpoint; default: a tiny one, made here",
    port="port on 127.0.0.1",
    foreground="stay, show the log, stop the server on Ctrl-C",
    offline=OFFLINE,
)
def up(
    _ctx: Context,
    device: str = "auto",
    model: str = "",
    port: str = "8000",
    foreground: bool = False,
    offline: str = "",
) -> None:
    """Set everything up and serve: environment, patches, model, validation, server, first token."""
    room("forge.offline").use_bundle(offline)
    number = whole_number("--port", port)
    choice = room("serve.device").choose(device)
    say(f"device: {choice.device}, because {choice.why}")
    room("serve.launch").check_free(number)
    steps = Steps(5)
    server = room("serve.embedded").up(room("forge.embedded").prepare(steps).python, model, number, steps)
    room("serve.screen").show_ready(server)
    if foreground:
        room("serve.screen").stay(server)


@verb()
def down(_ctx: Context) -> None:
    """Stop the server and every process it started."""
    say(f"stopped {room('serve.launch').stop().url}")


@verb()
def status(_ctx: Context) -> None:
    """Say what is served, and whether it is healthy."""
    room("serve.screen").show_status(room("serve.record").running())


@verb(follow="go on as the log grows")
def logs(_ctx: Context, follow: bool = False) -> None:
    """Print the server's log."""
    room("serve.screen").show_log(follow=follow)


@verb(message="what to say", max_tokens="longest answer")
def chat(_ctx: Context, message: str, max_tokens: str = "64") -> None:
    """Say something to the model and print its answer as it comes."""
    limit = whole_number("--max-tokens", max_tokens)
    room("serve.screen").show_chat(room("serve.record").running(), message, limit)


@verb(fast="unit tests only: offline, seconds", select="pytest's -k expression")
def test(_ctx: Context, fast: bool = False, select: str = "") -> None:
    """Run the tests in an environment of their own."""
    room("forge.suite").run_tests(fast=fast, select=select)


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
    names = [name for name in more.split(",") if name]
    room("forge.bundle").show(Path(output), stack=stack, machine=machine, python=python, more=names)


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


@verb(stack="one stack only")
def pins_update(_ctx: Context, stack: str = "") -> None:
    """Propose newer versions as a diff of pins.toml, with what the patches would do there; changes nothing."""
    room("forge.update").show(stack)


@verb(output="JSON file for the figures")
def bench_startup(_ctx: Context, output: str = "bench/results/startup.json") -> None:
    """Time cold and warm `./inv up` by step, the validator, and packed against dequantised experts."""
    room("bench.startup").main(output)


namespace = Collection(up, down, status, logs, chat, test, sources, provenance)
namespace.add_collection(Collection("pins", check=pins_check, lock=pins_lock, update=pins_update))
namespace.add_collection(Collection("bench", startup=bench_startup))
patch = Collection("patch", reverse=patch_reverse, status=patch_status, new=patch_new, rebase=patch_rebase)
patch.add_task(patch_apply, name="apply", default=True)
namespace.add_collection(patch)
bundle = Collection("bundle", unpack=bundle_unpack)
bundle.add_task(bundle_make, name="make", default=True)
namespace.add_collection(bundle)
