"""Sparkforge's commands. Each is a thin Invoke task: its docstring is the help, the rooms do the work."""

from importlib import import_module as room  # a room is loaded only by the task that needs it

from invoke.collection import Collection
from invoke.context import Context

from forge import verbs
from sparkforge.command import verb, whole_number
from sparkforge.console import Steps, say


@verb(
    device="auto, embedded (vLLM's CPU build) or docker",
    model="folder of a gpt-oss checkpoint; default: a tiny one, made here",
    port="port on 127.0.0.1",
    foreground="stay, show the log, stop the server on Ctrl-C",
    offline=verbs.OFFLINE,
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


@verb(output="JSON file for the figures")
def bench_startup(_ctx: Context, output: str = "bench/results/startup.json") -> None:
    """Time cold and warm `./inv up` by step, the validator, and packed against dequantised experts."""
    room("bench.startup").main(output)


namespace = Collection(up, down, status, logs, chat, test)
for each in (verbs.sources, verbs.provenance, verbs.toolchain, verbs.audit, verbs.cache, verbs.clean_cache):
    namespace.add_task(each)
pins = {"check": verbs.pins_check, "lock": verbs.pins_lock, "update": verbs.pins_update}
patch = {
    "reverse": verbs.patch_reverse,
    "status": verbs.patch_status,
    "new": verbs.patch_new,
    "rebase": verbs.patch_rebase,
}
patches, bundles = Collection("patch", **patch), Collection("bundle", unpack=verbs.bundle_unpack)
patches.add_task(verbs.patch_apply, name="apply", default=True)
bundles.add_task(verbs.bundle_make, name="make", default=True)
for collection in (Collection("pins", **pins), patches, bundles, Collection("bench", startup=bench_startup)):
    namespace.add_collection(collection)
