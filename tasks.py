"""Sparkforge's commands. Each is a thin Invoke task: its docstring is the help, the rooms do the work."""

from invoke import Collection, task

from sparkforge.command import command, whole_number


@task(
    help={
        "device": "auto, embedded (vLLM's CPU build) or docker",
        "model": "folder of a gpt-oss checkpoint; default: a tiny one, made here",
        "port": "port on 127.0.0.1",
        "foreground": "stay, show the log, stop the server on Ctrl-C",
    },
)
@command
def up(_ctx, device="auto", model="", port="8000", foreground=False):
    """Set everything up and serve: environment, patches, model, validation, server, first token."""
    from forge.embedded import prepare
    from serve import embedded, launch, screen
    from serve.device import choose
    from sparkforge.console import Steps, say

    number = whole_number("--port", port)
    choice = choose(device)
    say(f"device: {choice.device}, because {choice.why}")
    launch.check_free(number)
    steps = Steps(5)
    server = embedded.up(prepare(steps).python, model, number, steps)
    screen.show_ready(server)
    if foreground:
        screen.stay(server)


@task
@command
def down(_ctx):
    """Stop the server and every process it started."""
    from serve import launch
    from sparkforge.console import say

    say(f"stopped {launch.stop().url}")


@task
@command
def status(_ctx):
    """Say what is served, and whether it is healthy."""
    from serve import record, screen

    screen.show_status(record.running())


@task(help={"follow": "go on as the log grows"})
@command
def logs(_ctx, follow=False):
    """Print the server's log."""
    from serve import screen

    screen.show_log(follow=follow)


@task(help={"message": "what to say", "max-tokens": "longest answer"})
@command
def chat(_ctx, message, max_tokens="64"):
    """Say something to the model and print its answer as it comes."""
    from serve import record, screen

    screen.show_chat(record.running(), message, whole_number("--max-tokens", max_tokens))


@task(help={"fast": "unit tests only: offline, seconds", "select": "pytest's -k expression"})
@command
def test(_ctx, fast=False, select=""):
    """Run the tests in an environment of their own."""
    from forge import suite

    suite.run_tests(fast=fast, select=select)


@task
@command
def pins_check(_ctx):
    """Refuse what is wrong in pins.toml, and locks that are older than their inputs."""
    from forge import locks, pins
    from sparkforge.console import say

    table = pins.load()
    locks.require_current()
    say(f"pins.toml is well-formed: {len(list(table.components()))} components in {', '.join(table.stacks)}")


@task
@command
def pins_lock(_ctx):
    """Resolve every locks/*.in again into its hash-locked set."""
    from forge import locks
    from sparkforge.console import say

    for path in locks.compile_all():
        say(f"locked {path.name}")


@task
@command
def docs_errors(_ctx):
    """Write docs/errors.md anew from the error classes."""
    from sparkforge.errors import page
    from sparkforge.files import write_atomic
    from sparkforge.paths import ROOT

    write_atomic(ROOT / "docs" / "errors.md", page())


@task(help={"stack": "one stack only"})
@command
def pins_update(_ctx, stack=""):
    """Propose newer versions as a diff of pins.toml, with what the patches would do there; changes nothing."""
    from forge import pins, update

    update.show(update.proposals(pins.load(), stack))


@task(help={"output": "JSON file for the figures"})
@command
def bench_startup(_ctx, output="bench/results/startup.json"):
    """Time cold and warm `./inv up` by step, the validator, and packed against dequantised experts."""
    from bench import startup

    startup.main(output)


namespace = Collection(up, down, status, logs, chat, test)
namespace.add_collection(Collection("pins", check=pins_check, lock=pins_lock, update=pins_update))
namespace.add_collection(Collection("docs", errors=docs_errors))
namespace.add_collection(Collection("bench", startup=bench_startup))
