"""`python3 -m sparkforge.serve.entrypoint [WORDS]`: the container's program. It validates, then serves.

WORDS are the arguments after the image's name in `docker run`, as people type them for vLLM:

    vllm serve MODEL [FLAGS]   or: serve MODEL [FLAGS], MODEL [FLAGS], --model MODEL [FLAGS], [FLAGS]
    validate [MODEL] [FLAGS]   validate such a server and end

MODEL is a folder, or a repository such as openai/gpt-oss-120b that a mounted cache of Hugging Face holds; without one
it is SPARKFORGE_MODEL. FLAGS are vLLM's; they override the profile's. Other programs (bash, python,
nvidia-smi) are run by deploy/start, without validation.

The validator's report goes to the log, to SPARKFORGE_RUN/validation.json and to a Prometheus textfile beside it. If the
verdict lets the server start, this process writes a readiness file and replaces itself with
sparkforge/serve/supervise.py, which runs vLLM's API server and judges its end. A failed validation ends with exit code
30 (docs/concepts/validation.md), or with SPARKFORGE_REFUSED=hold waits and validates again.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sparkforge.core import memory, paths
from sparkforge.core.console import echo, say, show_error
from sparkforge.core.errors import RefusalError, SparkforgeError, StorageError, UsageError, with_remark
from sparkforge.core.files import write_atomic, write_json
from sparkforge.core.process import ProbeError, ending, watch
from sparkforge.core.vllm_flags import MODEL, QUANTIZATION, REVISION, flag_value, positional, without_flag
from sparkforge.models import local
from sparkforge.serve import access, command_line, hold, limits, profiles, record, restarts, settings
from sparkforge.serve.command_line import ServerCommand
from sparkforge.serve.health import HELD_FILE, READY
from sparkforge.serve.settings import Settings
from sparkforge.serve.supervise import supervised
from validate import textfile
from validate.checks.finding import Finding, Status
from validate.gate import ValidationReport, ValidationVerdict, as_document

CLUSTER = "SPARKFORGE_CLUSTER_WATCH"  # on a node of a cluster: WATCH's options; WATCH ends this node with the others
WATCH = Path(__file__).with_name("cluster") / "watch.py"  # run as a file, like supervise.py
REPORT = "validation.json"
REFUSED = "refused.json"  # in SPARKFORGE_STATE, which outlives the container's tmpfs: for `./inv doctor`
API_SERVER = ["-m", command_line.MODULE]
COMPILE_BYTES = 13_000_000_000  # FlashInfer's hungriest unit takes 11.2 GB (sparkforge/compile/peaks.toml)
TERMINATED = 128 + signal.SIGTERM


def main(arguments: Sequence[str]) -> int:
    """Validate and become the server; return an exit code only if no server starts."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(TERMINATED))  # a container's first process has no default handlers
    try:
        if list(arguments[:1]) in (["--help"], ["-h"]):
            echo(str(__doc__))
            return 0
        request = read_arguments(arguments)
        options = settings.read(os.environ)
        with _writing(options.run):  # an earlier start's verdict must not be taken for this one's
            options.run.mkdir(parents=True, exist_ok=True)
            # A validation may share the folder with a server that runs, as `docker compose run vllm validate` does.
            for name in (REPORT, *(() if request.only_validate else (READY, HELD_FILE, textfile.NAME))):
                (options.run / name).unlink(missing_ok=True)
        server = plan(options, request)
        host, port = server.address()
        key = server.environment.get(access.KEY, "")
        if options.bind:
            access.require_key(options.bind, key)
        if access.has_host_network():
            access.require_key(host, key)
        if request.only_validate:
            return int(validate(options, server)["exit_code"])
        if not os.environ.get(CLUSTER):  # for a cluster, serve/cluster/start.py does this
            restarts.admit([socket.gethostname(), *server.command(sys.executable)], options.run)
        if options.refused == settings.HOLD:
            hold.until_admitted(lambda: admit(options, server), lambda line: _held(options, line))
        else:
            admit(options, server)
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared with, not bound
        ready = {"host": reachable, "port": 0 if server.headless else port, "validated": options.mode}
        (options.run / HELD_FILE).unlink(missing_ok=True)
        _write(options.run / READY, {**ready, "key": access.digest(key)}, mode=0o600)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    say("vLLM's worker starts" if server.headless else f"vLLM's API server starts on {host}:{port}")
    return become(server)


def become(server: ServerCommand) -> NoReturn:
    """Replace this process with the server's supervisor, which passes signals on and never ends with 0 by itself."""
    command = server.command(sys.executable)
    if options := os.environ.get(CLUSTER):
        command = (sys.executable, "-P", str(WATCH), *json.loads(options), "--", *command)
    else:
        restarts.begin([socket.gethostname(), *command])
    command = supervised(command, record.end_path(), server.model)
    os.execvpe(command[0], command, server.environment)  # noqa: S606 - this process becomes the server


class ContainerArguments(NamedTuple):
    """The parsed arguments after the image's name: a model (empty: none named), and vLLM's arguments."""

    model: str = ""
    arguments: tuple[str, ...] = ()
    only_validate: bool = False


def read_arguments(arguments: Sequence[str]) -> ContainerArguments:
    """Read the container's arguments. Raises UsageError for two models, and for one that may be a flag's value."""
    remaining = list(arguments)
    only_validate = remaining[:1] == ["validate"]
    for start in (["vllm", "serve"], ["serve"], ["validate"], ["python", *API_SERVER], ["python3", *API_SERVER]):
        if remaining[: len(start)] == start:
            remaining = remaining[len(start) :]
            break
    models = [remaining.pop(0)] if remaining and not remaining[0].startswith("-") else []
    if model := flag_value(remaining, MODEL):
        models.append(model)
        remaining = without_flag(remaining, MODEL)
    if len(models) > 1:
        raise UsageError(f"two models are named: {' and '.join(models)}", "a server has one", f"unset {MODEL}")
    places = ("/", "./", "../", "~")
    words = [
        word
        for word, flag in positional(remaining)
        if not flag or word == settings.TINY or local.REPOSITORY.fullmatch(word) or word.startswith(places)
    ]
    if words and not models:
        why = "after a flag it may be the flag's value or the model, and another model must not be served in its place"
        fix = "again   # but put the model first: MODEL --flag=value"
        raise UsageError(f"{words[0][:200]!r} is ambiguous", why, fix)
    return ContainerArguments("".join(models), tuple(remaining), only_validate)


def plan(options: Settings, request: ContainerArguments) -> ServerCommand:
    """Return the server that the settings and the request describe, and write the tiny model if it is requested."""
    arguments = (*options.arguments, *request.arguments)
    access.refuse_key_argument(arguments)
    hosts = access.named_hosts(os.environ.get(access.HOSTS, ""))
    profiles.named(options.serve_profile, stack=options.stack)  # an unknown one is refused before anything is written
    secrets = settings.secrets(os.environ)
    environment = {name: value for name, value in os.environ.items() if name != settings.VLLM_ARGS}
    memory_left = memory.measure()
    if memory_left.bound != "MemAvailable" and memory_left.available < COMPILE_BYTES:
        environment.setdefault("FLASHINFER_DISABLE_JIT", "1")  # a missing module is an error that names it
    model, model_id = request.model or options.model, options.model_id
    if request.model and not os.environ.get("SPARKFORGE_MODEL_ID"):
        model_id = settings.served_id(model)
    is_tiny = model == settings.TINY
    if is_tiny:
        from sparkforge.models.tiny import write_tiny  # noqa: PLC0415 - numpy and the vocabulary, for this model only

        model = str(write_tiny(paths.state() / "models" / settings.TINY_ID))
    else:
        folder = local.find(model, os.environ, flag_value(arguments, REVISION) or "")
        if cache := local.hub_cache_of(folder):  # a draft model or tokenizer named in the flags is in the same cache
            environment.setdefault("HF_HUB_CACHE", str(cache))
        model = str(folder)
        readable = (local.MOUNTED / name for name in local.TOKENS if os.access(local.MOUNTED / name, os.R_OK))
        if token := next(readable, None):
            mount = f"-v ~/.cache/huggingface/hub:{local.MOUNTED}/hub:ro"
            say(f"NOTE: the server can read your token {token}; without it: docker run {mount}")
    family = settings.family(model)
    if flag_value(arguments, QUANTIZATION) == "mxfp4":
        # `mxfp4` names the checkpoint's own format. With a profile it would do more: with --quantization-config vLLM
        # applies it to the linear layers too, and on a CPU it selects stock vLLM's method, which needs AMX.
        say(f"{QUANTIZATION} mxfp4 is the checkpoint's format already; the profile chooses the kernels")
        arguments = tuple(without_flag(arguments, QUANTIZATION))
    # On the host's network nothing is in front of the server; on a container's, the host publishes the port.
    any_address = "0.0.0.0"  # noqa: S104
    return ServerCommand(
        model=model,
        model_id=model_id,
        host=(options.bind or "127.0.0.1") if access.has_host_network() else any_address,
        port=8000,
        profile=profiles.named(options.serve_profile, stack=options.stack, family=family),
        extra_arguments=(*(command_line.profiler_arguments(options.traces) if options.traces else ()), *arguments),
        extra_environment={
            **environment,
            **(command_line.PROFILER_ENVIRONMENT if options.traces else {}),
            **secrets,
            access.HOSTS: ",".join((*access.LOOPBACK, *hosts)) if hosts else "",  # loopback: its own health check
            **limits.variables(os.environ),
        },
        forked=is_tiny and options.profile == "embedded",
    )


def admit(options: Settings, server: ServerCommand) -> None:
    """Let the server start or raise RefusalError; the report and the textfile are written either way."""
    if options.mode == settings.OFF:
        say("WARNING: SPARKFORGE_VALIDATE=off, so nothing was validated")
        return
    document = validate(options, server)
    _write(options.run / textfile.NAME, textfile.text(document, options.mode))
    if document["verdict"] == ValidationVerdict.SERVE:
        return
    findings = document["findings"]
    failed = [finding for finding in findings if finding["status"] == Status.FAIL]
    failed = failed or [row for row in findings if row["status"] == Status.SKIPPED and row["required"]]
    why = "; ".join(f"{finding['check']}: {finding['evidence']}" for finding in failed[:3])
    why += f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    if options.mode == settings.WARN:
        say(f"WARNING: {why}; SPARKFORGE_VALIDATE=warn lets the server start all the same")
        return
    with suppress(OSError, StorageError):  # there may be no lasting folder
        write_json(paths.state() / REFUSED, {"document": document})
    fix = with_remark(failed[0]["fix"] if failed else "docker compose logs vllm", f"then {start_again()}")
    raise RefusalError("the validator refuses to serve", why, fix, code="validation.failed")


def _held(options: Settings, line: str) -> None:
    """Say in the log and to the health check that this container waits. Raises StorageError."""
    say(line)
    _write(options.run / HELD_FILE, line.encode())


def validate(options: Settings, server: ServerCommand) -> dict[str, Any]:
    """Run the validator in a process of its own, which may hang, and return its report as a JSON document."""
    report = options.run / REPORT
    command: list[str | Path] = [sys.executable, "-m", "validate", "--profile", options.profile, "--json", report]
    command += ["--stack", options.stack] if options.stack else []
    command += ["--serve-args", *server.arguments]
    try:
        code = watch(command, seconds=options.seconds, env=server.environment)
        why = f"did not end within {options.seconds:g} s" if code is None else ending(code)
    except ProbeError as error:
        code, why = None, str(error)
    try:
        document: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        if document["exit_code"] == code:
            return document
        why = f"{why}, its report says {document['exit_code']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{why} and left no report ({type(error).__name__})"
    say(f"FAIL validator  the validator {why}")
    fix = "nvidia-smi   # if that hangs too, reboot; longer: SPARKFORGE_VALIDATE_SECONDS=1200"
    doc = "docs/concepts/validation.md#in-the-image"
    finding = Finding("validator", Status.FAIL, True, f"the validator {why}", fix, doc)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    refusal = ValidationReport(options.profile, ValidationVerdict.REFUSE, (finding,), {}, {}, now, "this machine")
    document = as_document(refusal)
    _write(report, document)
    return document


def start_again() -> str:
    """Return the command that restarts this container by its id, and in a comment the one that recreates it."""
    compose = "docker compose up -d"
    if not (identifier := restarts.container_id()):
        return compose
    own = "" if os.environ.get(paths.COMPOSE_FILES) else ", followed by your own -f files"
    return f"docker start {identifier}   # after a change of Compose's settings: {compose}{own}"


def _write(path: Path, value: Mapping[str, Any] | bytes, *, mode: int = 0o644) -> None:
    with _writing(path.parent):
        write_atomic(path, value, mode=mode) if isinstance(value, bytes) else write_json(path, value, mode=mode)


@contextmanager
def _writing(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error} (running as uid {os.getuid()})"
        fix = f"again   # first mount a tmpfs there: --tmpfs {run}:mode=1777, or set SPARKFORGE_RUN"
        raise StorageError(f"cannot write into {run}", why, fix, code="storage.access") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
