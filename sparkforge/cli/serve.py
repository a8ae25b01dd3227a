"""Commands that serve a model and use the server, and those for its systemd unit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from invoke.context import Context

from sparkforge.cli.build import OFFLINE, build_image
from sparkforge.cli.command import caller_path, listed, option, task, whole_number
from sparkforge.core import paths
from sparkforge.core.console import echo, echo_json, say
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.serve.hold import hold_start, tell_systemd

if TYPE_CHECKING:
    from sparkforge.models.recipes import Recipe
    from sparkforge.serve.record import Server, StartPlan

PORT = "8000"
OF_A_FLEET = (
    "port", "host", "api_key_file", "allow_hosts", "python", "offline", "fleet", "tiny_first", "foreground", "hold",
)  # fmt: skip


@dataclass(frozen=True)
class ServeOptions:
    """The command-line options of commands that start a server."""

    device: str = option(
        "auto, embedded (vLLM's CPU build), gpu (its CUDA build, without Docker), docker, or docker-cpu", "auto"
    )
    model: str = option(
        "folder, or repository that is on this machine; default: gpt-oss-120b, or a tiny one without a GPU [MODEL]"
    )
    profile: str = option("a table of sparkforge/serve/profiles.toml: safe, fast, long-context, …")
    port: str = option("port to listen on; default 8000 [PORT]")
    host: str = option("IP address to listen on; default 127.0.0.1; one that others can reach needs --api-key-file")
    context: str = option("longest sequence in tokens, prompt and answer; default: the profile's [MAX_MODEL_LEN]")
    api_key_file: str | None = option(
        "file with the API key that clients must send: one line, readable only by you", None
    )
    allow_hosts: str = option("more names for the Host header, comma-separated: spark.local,localhost:9000")
    stack: str = option("a stack of pins.toml; default: the device's")
    python: str = option("Python interpreter of your own environment with vLLM, instead of the locked one")
    vllm_flags: Sequence[str] = option("vLLM's own flags, as in: -- --max-num-seqs 4", ())


def planned(options: ServeOptions) -> StartPlan:
    """Return the plan for a command's options, MODEL, PORT and MAX_MODEL_LEN; print the device and the reason for it.

    Raises UsageError for an invalid option.
    """
    from sparkforge.core.vllm_flags import NAMES, passable
    from sparkforge.image.devices import CONTAINERS
    from sparkforge.serve import access, settings
    from sparkforge.serve.devices.choose import choose
    from sparkforge.serve.record import StartPlan

    port = whole_number("--port" if options.port else "PORT", options.port or os.environ.get("PORT") or PORT)
    named = options.model or os.environ.get("MODEL", "")
    model = settings.checkpoint(named, caller_path(named))
    key_file = caller_path(options.api_key_file) if options.api_key_file else options.api_key_file
    address = access.listen_address(options.host, key_file)
    variables = settings.with_context(os.environ, options.context, options.vllm_flags)
    choice = choose(options.device)
    in_container = choice.device in CONTAINERS
    flags = passable(options.vllm_flags, relative_to=None if in_container else caller_path("."))
    if names := listed(os.environ.get("SPARKFORGE_SERVED_NAMES", "")):  # set for each model of a fleet
        flags = (*flags, NAMES, *names)
    if not getattr(options, "fleet", ""):  # in a fleet, each model has a device of its own
        say(f"device: {choice.device}, because {choice.why}")
    if options.python and in_container:
        fix = "without --python   # or with --device gpu"
        raise UsageError("--python has no meaning here", "a container has its own", fix)
    return StartPlan(
        choice.device,
        python=caller_path(options.python),
        model=model,
        profile=options.profile,
        stack=options.stack,
        port=port,
        host=options.host and address,
        key_file=key_file,
        hosts=tuple(listed(options.allow_hosts)),
        flags=flags,
        variables=variables,
    )


def chosen(options: UpOptions, recipe: Recipe) -> UpOptions:
    """Return the options with the recipe's model and flags.

    Raises UsageError if `options.model` is set, and the errors of `profiles.require_recipe`.
    """
    from sparkforge.image.devices import stack_of
    from sparkforge.serve import profiles
    from sparkforge.serve.devices.choose import choose

    if options.model:
        failure = f"--model cannot be combined with the recipe {options.recipe}"
        raise UsageError(failure, "both name a model", "without --model")
    device = choose(options.device).device
    context = whole_number("--context", options.context) if options.context else 0
    profiles.require_recipe(options.recipe, recipe, stack_of(device, options.stack), device, context)
    return replace(options, model=recipe.repository, vllm_flags=(*recipe.arguments(), *options.vllm_flags))


@dataclass(frozen=True)
class UpOptions(ServeOptions):
    """Options of `./inv up`."""

    recipe: str = option("a recipe, see ./inv models; default: the device's default model", positional=True)
    fleet: str = option("several models at one URL: a fleet.toml; default: that of this folder, or of the state folder")
    quantization: str = option("spark-mxfp4: our own expert kernels, with the profile of this name or --profile")
    profiler: bool = option("start it with vLLM's torch profiler, for ./inv bench.profile", False)
    tiny_first: bool = option(
        "on a GPU: the tiny model must give its recorded answers before another one is loaded", True
    )
    foreground: bool = option("stay, show the log, stop the server on Ctrl-C", False)
    hold: bool = option("after a failed validation wait and validate again, as the systemd unit does", False)
    offline: str = option(OFFLINE)


@task(
    example="./inv up gpt-oss-120b --device docker --profile fast",
    optional="recipe",
    rest="vllm_flags",
    options=UpOptions,
)
def up(_ctx: Context, options: UpOptions) -> None:
    """Prepare what is missing, validate it, and serve a model.

    The steps are environment, model, validation, server and first answers. A recipe names the model, the profile on a
    Spark, and flags. MODEL, PORT, TP and MAX_MODEL_LEN are taken from the environment if the option is not given.
    vLLM's own flags follow --, and override those of the profile and the recipe.
    """
    from sparkforge.serve import record, status

    start = partial(started, options)
    server = hold_start(start) if options.hold else start()
    status.show_ready(server)
    tell_systemd(ready=True, status=f"{server.model_id} at {server.url}/v1; first answers received")
    if options.foreground:
        with record.remembered():
            status.stay(server)


def started(options: UpOptions) -> Server:
    """Start the server that the options describe. Raises the errors of `sparkforge.serve.devices.device.start`."""
    from sparkforge.image.devices import DOCKER, GPU
    from sparkforge.models import recipes
    from sparkforge.plan import capabilities
    from sparkforge.serve import profiles, record
    from sparkforge.serve.devices.choose import device_for
    from sparkforge.serve.devices.device import start
    from sparkforge.sources.offline import use_bundle

    with record.remembered():
        use_bundle(caller_path(options.offline))
        if options.fleet:
            return started_fleet(options)
        recipe = recipes.named(options.recipe) if options.recipe else None
        plan = planned(chosen(options, recipe) if recipe else options)
        profile = options.profile or (recipe.profile if recipe and plan.device == DOCKER else "")
        if plan.device == GPU and options.quantization:
            profile = profile or capabilities.find(os.environ)[1].profile
        profile, flags = profiles.with_quantization(
            options.quantization, profile, plan.flags, gpu=plan.device == DOCKER, stack=plan.stack
        )
        plan = replace(plan, profile=profile, flags=flags, profiled=options.profiler, tiny_first=options.tiny_first)
        return start(device_for(plan, build_image))


def started_fleet(options: UpOptions) -> Server:
    """Start several models. Raises UsageError for options that fleet.toml sets for each model."""
    from sparkforge.image.devices import EMBEDDED
    from sparkforge.serve.fleet import keeper

    words = {"recipe": "a recipe", "vllm_flags": "flags after --"}
    named = [
        words.get(name, f"--{name.replace('_', '-')}")
        for name, default in vars(UpOptions()).items()
        if name not in OF_A_FLEET and getattr(options, name) != default
    ]
    if named:
        failure = f"--fleet cannot be combined with {', '.join(named)}"
        fix = "--help   # write it in fleet.toml, without the option"
        raise UsageError(failure, "each model of a fleet has its own", fix)
    places = [Path(caller_path(options.fleet)), *([] if "/" in options.fleet else [paths.state() / options.fleet])]
    file = next(filter(Path.is_file, places), places[0])
    return keeper.start(file, planned(replace(options, device=EMBEDDED)))


@task(example="./inv down")
def down(_ctx: Context) -> None:
    """Stop the server and every process it started.

    It also ends a start or a rollback that is under way. If nothing runs, it exits with 0.
    """
    from sparkforge.serve import launch

    try:
        stopped = launch.down()
        say(f"stopped {stopped.url}" if stopped else "stopped the processes of a killed ./inv up")
    except ServerError as error:
        if error.code != "server.not-running":
            raise
        say(f"nothing to stop: {error.why}")


@task(example="./inv status", json_="print it as JSON")
def status(_ctx: Context, json_: bool = False) -> None:
    """Print what is served, its load, and the memory it takes.

    Tokens per second come from two readings of the server's counters. It also prints the results of the server's
    first requests, and its last error. `watch ./inv status` repeats it.
    """
    from sparkforge.serve import record, status

    try:
        server = record.running()
    except ServerError:
        if json_:
            echo_json(status.report_of_none().model_dump(mode="json"))
        raise
    status.show_status(server, as_json=json_)


@task(example="./inv logs -f", follow="continue as the log grows")
def logs(_ctx: Context, follow: bool = False) -> None:
    """Print the server's log."""
    from sparkforge.serve import status

    status.show_log(follow=follow)


@task(
    example='./inv chat --system "Answer in one sentence."',
    optional="message",
    message="answer this one message and end",
    system="system prompt: instructions before the conversation",
    max_tokens="longest answer in tokens; default 64 for one message, 1024 in a conversation",
)
def chat(_ctx: Context, message: str, system: str = "", max_tokens: str = "") -> None:
    """Talk with the model, or get one answer.

    Without MESSAGE it is a conversation, in which the model sees what was said before. If stdin is a pipe or a file,
    its text is the message.
    """
    from sparkforge.serve import record

    require_message(message, "chat")
    talk(record.running(), message, system, whole_number("--max-tokens", max_tokens) if max_tokens else None)


@task(
    example='./inv run gpt-oss-120b "Hello"',
    optional="message",
    model="a name of ./inv list, or a folder",
    message="answer this one message and end",
    device="as in ./inv up",
    profile="as in ./inv up",
)
def run(_ctx: Context, model: str, message: str, device: str = "auto", profile: str = "") -> None:
    """Talk with a model; start it if it is not served.

    It combines `up` and `chat`: the server keeps running. A server of another model is not replaced.
    """
    from sparkforge.image.devices import EMBEDDED, FLEET
    from sparkforge.serve import record, status, stored
    from sparkforge.serve.command_line import api_names
    from sparkforge.serve.settings import TINY_ID

    require_message(message, "run")
    name, folder = (Path(model).name, caller_path(model)) if model.startswith((".", "/", "~")) else (model, "")
    server = record.read()
    if server is None or not server.alive:
        if name == TINY_ID:
            device = EMBEDDED if device == "auto" else device
        elif not folder:
            found = stored.find(name, os.environ)
            folder = found.name if "/" in found.name else str(found.folder)
        server = started(UpOptions(device=device, model=folder, profile=profile))
        status.show_ready(server)
    elif server.device == FLEET:
        server = replace(server, model_id=model)
    elif not set(api_names(name)) & set(api_names(server.model_id)):
        failure, why = f"{name} is not served", f"{server.model_id} is, at {server.url}"
        raise ServerError(failure, why, f"./inv down && ./inv run {model}", code="server.running")
    talk(server, message)


def require_message(message: str, command: str) -> None:
    """Raise UsageError for an unknown option, because Invoke parses it as the message."""
    if message.startswith("-"):
        why, fix = "its options are in --help", "./inv chat --help   # send a message that begins with - on stdin"
        raise UsageError(f"./inv {command} has no option {message[:40]}", why, fix)


def talk(server: Server, message: str, system: str = "", limit: int | None = None) -> None:
    """Print the answer to `message`, or to the text on stdin; start a conversation if there is neither."""
    from sparkforge.serve import conversation

    if text := message or conversation.message_on_stdin():
        limit = conversation.ONCE_TOKENS if limit is None else limit
        conversation.Conversation(server, system, limit).ask(text)
    else:
        conversation.converse(server, system, conversation.TOKENS if limit is None else limit)


@task(
    example="./inv rollback --list",
    list="print the known good starts and change nothing",
    to="the number of a start in that list; default: the start before the running server's",
    dry_run="print what would be changed, change nothing",
)
def rollback(
    _ctx: Context,
    list: bool = False,  # noqa: A002 - the option's name
    to: str = "",
    dry_run: bool = False,
) -> None:
    """Restore the image, profile and options of the last known good start."""
    from sparkforge.serve import known_good, status
    from sparkforge.serve.devices.choose import device_for
    from sparkforge.serve.devices.device import run

    def starter(plan: StartPlan) -> Callable[[], Server]:
        """Return a function that starts a recorded plan. A missing image is an error and is not built."""
        return partial(run, device_for(plan, lambda *_: None))

    if list:
        for number, start in enumerate(starts := known_good.read(), 1):
            echo(f"{number}  {start.title}")
        if not starts:
            say("no start is known to be good yet: ./inv up records a start that passed its proof")
    elif server := known_good.roll_back(starter, whole_number("--to", to) if to else 0, dry_run=dry_run):
        status.show_ready(server)


@task(
    example="./inv max.up --device cpu",
    model="gpt-oss checkpoint with MXFP4 experts: a folder, or OWNER/NAME on this machine; default: a tiny one",
    device="cpu (float32, for small models) or gpu (not verified, see spark_mxfp4/docs/max.md)",
    port="port to listen on at 127.0.0.1",
    context="longest sequence in tokens, at least 1",
)
def max_up(_ctx: Context, model: str = "", device: str = "cpu", port: str = PORT, context: str = "512") -> None:
    """Serve gpt-oss with Modular's MAX and packed experts.

    The first start installs MAX, about 400 MB, and compiles the model for minutes; without --model, a tiny one.
    ./inv status, chat, logs and down work as after ./inv up. Its tokens matched the reference on a CPU and an H100.
    """
    from sparkforge.serve import record, settings, status
    from sparkforge.serve.devices.device import start
    from sparkforge.serve.devices.max_server import MaxServer
    from sparkforge.serve.record import StartPlan

    with record.remembered():
        folder = settings.checkpoint(model, caller_path(model))
        length = {settings.CONTEXT_VARIABLE: str(whole_number("--context", context))}
        plan = StartPlan("max", folder, profile=device, port=whole_number("--port", port), variables=length)
        server = start(MaxServer(plan))
    status.show_ready(server)


SYSTEM = "the system's service manager instead of your own; needs root (sudo)"


@task(
    example="./inv service.install --device docker --profile safe --now",
    options=ServeOptions,
    system=SYSTEM,
    user="with --system: the account that runs it; default: the owner of the checkout",
    now="start it too",
    show="print the unit and the file it would be written to, and change nothing",
    rest="vllm_flags",
    # The options apply when the unit is written, not when it starts.
    device="as for up; `auto` is decided now, not at boot",
    profile="docker: a serve profile",
)
def service_install(
    _ctx: Context, options: ServeOptions, system: bool = False, user: str = "", now: bool = False, show: bool = False
) -> None:
    """Have systemd start the server at boot and after a crash.

    It writes and enables the unit sparkforge.service, which runs `./inv up`. Run it again to change the unit.
    """
    from sparkforge.image.devices import CONTAINERS, stack_of
    from sparkforge.models import local
    from sparkforge.serve import service
    from sparkforge.serve.devices.choose import device_for

    service.version()  # raises ServerError without systemd
    named = options.model or os.environ.get("MODEL", "")
    if system and local.REPOSITORY.fullmatch(named) and not Path(caller_path(named)).is_dir():
        why = "with --system it would be looked up in root's cache of the hub, and the service runs as another account"
        fix = "--help   # name a folder of models/, which ./inv pull makes"
        raise UsageError(f"{named} is not a folder", why, fix)
    plan = planned(options)
    device_for(plan, build_image)  # checks the plan
    stack_of(plan.device, plan.stack)
    stated = {
        **{name: getattr(plan, name) for name in ("device", "model", "profile", "port", "host", "stack", "python")},
        "context": options.context,
        "api-key-file": plan.key_file,
        "allow-hosts": ",".join(plan.hosts),
    }
    arguments = tuple(f"--{name}={value}" for name, value in stated.items() if value)
    wanted = service.ServiceUnit(
        arguments=(*arguments, *(("--", *plan.flags) if plan.flags else ())),
        container=plan.device in CONTAINERS,
        places=tuple(dict.fromkeys([paths.state(), *([Path(plan.model)] if plan.model else [])])),
    )
    service.install(wanted, system=system, account=user, now=now, show=show)


@task(example="./inv service.remove", system=SYSTEM)
def service_remove(_ctx: Context, system: bool = False) -> None:
    """Stop the service and remove its unit.

    A unit that service.install did not write, or that was edited, stays.
    """
    from sparkforge.serve import service

    service.remove(system=system)
