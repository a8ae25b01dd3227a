"""Sparkforge's commands. Each is a thin Invoke task: its docstring is the help, the rooms do the work."""

from collections.abc import Callable
from functools import partial
from importlib import import_module as room  # a room is loaded only by the task that needs it

from invoke.collection import Collection
from invoke.context import Context

from bench import verbs as bench_verbs
from forge import verbs
from serve import verbs as serve_verbs
from sparkforge.command import named, verb, whole_number
from sparkforge.console import Steps, say


@verb(
    device="auto, embedded (vLLM's CPU build), docker, or docker-cpu (the container without a GPU)",
    model="folder of a gpt-oss checkpoint; default: a tiny one, made here, on devices without a GPU",
    profile="docker: a table of serve/profiles.toml, such as safe, fast or long-context",
    port="port on 127.0.0.1",
    foreground="stay, show the log, stop the server on Ctrl-C",
    offline=verbs.OFFLINE,
)
def up(
    _ctx: Context,
    device: str = "auto",
    model: str = "",
    profile: str = "",
    port: str = "8000",
    foreground: bool = False,
    offline: str = "",
) -> None:
    """Set everything up and serve: environment, patches, model, validation, server, first token."""
    with room("serve.failure").remembered():
        room("forge.offline").use_bundle(offline)
        number = whole_number("--port", port)
        choice = room("serve.device").choose(device)
        say(f"device: {choice.device}, because {choice.why}")
        room("serve.launch").check_free(number)
        if choice.container:
            variables = room("serve.docker_device").variables(model, profile, number)
            server = room("serve.docker_device").up(choice.device, variables, Steps(4), build_image)
        else:
            room("serve.embedded").check(model, profile)
            steps = Steps(5)
            server = room("serve.embedded").up(room("forge.embedded").prepare(steps).python, model, number, steps)
    room("serve.screen").show_ready(server)
    if foreground:
        room("serve.screen").stay(server)


def build_image(device: str, steps: Steps, **more: str) -> None:
    """Build a device's image through Compose; `more` are the keywords of forge.image.build."""
    room("forge.image").build(room("serve.docker_image").ready_to_build(device), steps=steps, **more)


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


@verb()
def shell(_ctx: Context) -> None:
    """Open a shell where the server runs: in its container, or with its environment first on PATH."""
    room("serve.screen").shell(room("serve.record").running())


@verb(device="docker or docker-cpu", image="an image's name, if it is not the device's")
def image_inspect(_ctx: Context, device: str = "docker", image: str = "") -> None:
    """Print an image's labels, platform, digests, provenance, size by layer, and what its manifest names."""
    room("serve.docker_image").inspect(device, image)


@verb(device="docker or docker-cpu", image="an image's name, if it is not the device's")
def image_verify(_ctx: Context, device: str = "docker", image: str = "") -> None:
    """Refuse an image that was not made from this checkout's patches and locks."""
    expected = partial(room("forge.image").expected, cpu=device == "docker-cpu")
    room("serve.docker_image").verify(device, image, expected)


@verb(
    repository="such as openai/gpt-oss-120b",
    revision="a commit, tag or branch; default: the pinned one",
    to="the folder to make; default: models/NAME, where Compose looks",
    mirror="folder with a copy of it, instead of the hub",
)
def model_fetch(_ctx: Context, repository: str, revision: str = "", to: str = "", mirror: str = "") -> None:
    """Bring a gpt-oss checkpoint: only what vLLM reads, resumed, every hash checked."""
    room("serve.hub").show(repository, revision, to, mirror)


@verb(message="what to say", max_tokens="longest answer")
def chat(_ctx: Context, message: str, max_tokens: str = "64") -> None:
    """Say something to the model and print its answer as it comes."""
    limit = whole_number("--max-tokens", max_tokens)
    room("serve.screen").show_chat(room("serve.record").running(), message, limit)


@verb(fast="unit tests only: offline, minutes", select="pytest's -k expression")
def test(_ctx: Context, fast: bool = False, select: str = "") -> None:
    """Run the tests in an environment of their own."""
    room("forge.suite").run_tests(fast=fast, select=select)


@verb(
    engine="native, or docker: the container image; docker-cpu: the one without a GPU",
    from_="wheel: upstream's vLLM with patched Python; source: vLLM's own extensions compiled",
    jobs="auto: as many as memory and cores allow; or a number",
    python="native: interpreter that serves, which the kernels are for",
    compile_python="native, from source: interpreter with torch and CUDA to compile against",
    sources="native, from source: folder of an unpacked bundle, or of git checkouts",
)
def build(
    _ctx: Context,
    engine: str = "native",
    from_: str = "wheel",
    jobs: str = "auto",
    python: str = "",
    compile_python: str = "",
    sources: str = "",
) -> None:
    """Bring, patch, compile and audit everything; a stage whose inputs stand does nothing."""
    native = {"way": from_, "jobs": jobs, "python": python, "compile_python": compile_python, "sources": sources}
    engines: dict[str, Callable[[], None]] = {
        "native": lambda: room("forge.build").show(room("forge.build").Wish(**native)),
        "docker": lambda: build_image("docker", Steps(1), way=from_, jobs=jobs),
        "docker-cpu": lambda: build_image("docker-cpu", Steps(1), way=from_, jobs=jobs),
    }
    named("--engine", engine, engines)()


@verb(
    only="whole, experts, ccache, unchanged, audit, projection, memory-6 -12 -20, with commas; default: all (an hour)",
    kernels="folder of built kernels; default .sparkforge/kernels",
    python="interpreter that they were built for",
    output="JSON file for the figures",
)
def bench_build(
    _ctx: Context, only: str = "", kernels: str = "", python: str = "", output: str = "bench/results/build.json"
) -> None:
    """Measure what compiling the kernels costs, and whether it stays within the memory."""
    room("bench.build").main(output, only, kernels, python)


@verb(output="JSON file for the figures")
def bench_startup(_ctx: Context, output: str = "bench/results/startup.json") -> None:
    """Time cold and warm `./inv up` by step, the validator, and packed against dequantised experts."""
    room("bench.startup").main(output)


namespace = Collection(up, down, status, logs, shell, chat, test)
for each in (
    verbs.sources,
    verbs.provenance,
    verbs.toolchain,
    verbs.audit,
    verbs.cache,
    verbs.clean_cache,
    verbs.verify_reproducible,
    serve_verbs.plan,
    serve_verbs.doctor,
):
    namespace.add_task(each)
pins = {"check": verbs.pins_check, "lock": verbs.pins_lock, "debian": verbs.pins_debian, "update": verbs.pins_update}
patch = {
    "reverse": verbs.patch_reverse,
    "status": verbs.patch_status,
    "new": verbs.patch_new,
    "rebase": verbs.patch_rebase,
}
patches, bundles = Collection("patch", **patch), Collection("bundle", unpack=verbs.bundle_unpack)
patches.add_task(verbs.patch_apply, name="apply", default=True)
bundles.add_task(verbs.bundle_make, name="make", default=True)
builds = Collection("build", kernels=verbs.build_kernels, vllm=verbs.build_vllm)
builds.add_task(build, name="all", default=True)
for collection in (
    Collection("image", inspect=image_inspect, verify=image_verify),
    Collection("model", fetch=model_fetch),
    Collection("pins", **pins),
    patches,
    bundles,
    builds,
    Collection("bench", **bench_verbs.TASKS, startup=bench_startup, build=bench_build, image=verbs.bench_image),
):
    namespace.add_collection(collection)
