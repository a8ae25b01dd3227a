"""`python3 -m sparkforge.serve.entrypoint [vLLM's arguments]`: the container's program. It validates, then serves.

The validator's report goes to the log, to SPARKFORGE_RUN/validation.json and to a Prometheus textfile beside it. Only
after a verdict that lets the server start is there a readiness file, and this process replaces itself by
sparkforge/serve/supervise.py, which runs vLLM's API server and judges its end. Every failed validation ends with exit
code 30 (docs/concepts/validation.md).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sparkforge.core import paths
from sparkforge.core.bounded import ProbeError, ending, watch
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import RefusalError, SparkforgeError, StorageError
from sparkforge.core.files import write_atomic, write_json
from sparkforge.serve import access, profiler, profiles, settings
from sparkforge.serve.command_line import ServerCommand
from sparkforge.serve.health import READY
from sparkforge.serve.settings import Settings
from sparkforge.serve.supervise import supervised
from validate import textfile
from validate.checks.finding import Status
from validate.facts.fact import SCHEMA
from validate.gate import ValidationVerdict

REPORT = "validation.json"
REFUSED = "refused.json"  # in SPARKFORGE_STATE, which must outlive the container's tmpfs to be of use
# Docker restarts after 0.1, 0.2, 0.4 s …: within this time a new start is the restart policy's, later a person's.
RESTARTED_SECONDS = 15.0
TERMINATED = 128 + signal.SIGTERM


def main(arguments: Sequence[str]) -> int:
    """Validate and become the server; returns an exit code only if that did not come about."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        options = settings.read(os.environ)
        _clear(options.run)
        server = plan(options, arguments)
        host, port = server.address()
        admit(options, server)
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared with, not bound
        ready = {"host": reachable, "port": port, "validated": options.mode}
        key = access.digest(server.environment.get(access.KEY, ""))
        _write(options.run / READY, {**ready, "key": key}, mode=0o600)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    say(f"vLLM's API server starts on {host}:{port}")
    return become(server)


def become(server: ServerCommand) -> NoReturn:
    """Replace this process by the server's supervisor, which passes signals on and never ends with 0 by itself."""
    command = supervised(server.command(sys.executable))
    os.execvpe(command[0], command, server.environment)  # noqa: S606 - this process becomes the server


def plan(options: Settings, arguments: Sequence[str]) -> ServerCommand:
    """Return the server that the settings and the arguments describe; the arguments come last and win.

    Writes the tiny model if that is asked for. Raises what `profiles.named`, `settings.secrets` and `write_tiny` raise,
    and UsageError for an API key among the arguments.
    """
    access.refuse_key_argument(arguments)
    profile, secrets = profiles.named(options.serve_profile, stack=options.stack), settings.secrets(os.environ)
    hosts = access.container_hosts(os.environ.get(access.HOSTS, ""))
    model = options.model
    if model == settings.TINY:
        from sparkforge.models.tiny import write_tiny  # noqa: PLC0415 - numpy and the vocabulary, for this model only

        model = str(write_tiny(paths.state() / "models" / settings.TINY_ID))
    return ServerCommand(
        model=model,
        model_id=options.model_id,
        host="0.0.0.0",  # noqa: S104 - the container's own network; compose publishes it on 127.0.0.1
        port=8000,
        profile=profile,
        extra_arguments=(
            *(profiler.arguments(options.traces) if options.traces else ()),
            *options.arguments,
            *arguments,
        ),
        extra_environment={
            **os.environ,
            **(profiler.ENVIRONMENT if options.traces else {}),
            **secrets,
            access.HOSTS: hosts,
        },
    )


def admit(options: Settings, server: ServerCommand) -> None:
    """Let the server start or raise RefusalError; the report and the textfile are written either way."""
    if options.mode == settings.OFF:
        say("WARNING: SPARKFORGE_VALIDATE=off, so nothing was validated")
        return
    document = _refused_just_now(options, server) or validate(options, server)
    _write(options.run / textfile.NAME, textfile.text(document, options.mode))
    if document["verdict"] == ValidationVerdict.SERVE:
        return
    if options.mode == settings.WARN:
        say(f"WARNING: {_summary(document)}; SPARKFORGE_VALIDATE=warn lets the server start all the same")
        return
    with suppress(OSError):  # where there is no lasting folder, a restart that comes by itself asks again
        kept = {"for": _identity(server), "ended": time.time(), "document": document}
        write_json(paths.state() / REFUSED, kept)
    fix = next((finding["fix"] for finding in _refusing(document)), "docker compose logs vllm")
    raise RefusalError(
        "the validator refuses to serve",
        _summary(document),
        f"{fix}; then: docker compose up -d",
        code="validation.failed",
    )


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
    return _no_answer(options, report, f"the validator {why}")


def _no_answer(options: Settings, report: Path, why: str) -> dict[str, Any]:
    """Write and return the report of a validator that gave none: refused."""
    finding = {
        "check": "validator",
        "status": str(Status.FAIL),
        "required": True,
        "evidence": why,
        "fix": "nvidia-smi   # if that hangs too, reboot; longer: SPARKFORGE_VALIDATE_SECONDS=1200",
        "doc": "docs/concepts/validation.md#in-the-image",
    }
    document = {
        "schema": SCHEMA,
        "profile": options.profile,
        "verdict": str(ValidationVerdict.REFUSE),
        "exit_code": RefusalError.exit_code,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "origin": "this machine",
        "seconds": {},
        "findings": [finding],
        "facts": {},
    }
    say(f"FAIL validator  {why}")
    _write(report, document)
    return document


def _summary(document: Mapping[str, Any]) -> str:
    """The findings that refuse, in one sentence."""
    worst = _refusing(document)
    summary = "; ".join(f"{finding['check']}: {finding['evidence']}" for finding in worst[:3])
    return summary + (f"; and {len(worst) - 3} more" if len(worst) > 3 else "")


def _refusing(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    failed = [finding for finding in document["findings"] if finding["status"] == Status.FAIL]
    return failed or [
        finding for finding in document["findings"] if finding["status"] == Status.SKIPPED and finding["required"]
    ]


def _refused_just_now(options: Settings, server: ServerCommand) -> dict[str, Any] | None:
    """Return the report with which this very container was refused seconds ago; None if it must be asked.

    A restart policy starts a container that failed again at once. Nothing has changed by then, and a validation on
    a machine in trouble can take minutes.
    """
    try:
        kept = json.loads((paths.state() / REFUSED).read_text(encoding="utf-8"))
        age, document = time.time() - float(kept["ended"]), dict(kept["document"])
        same = kept["for"] == _identity(server)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if options.mode != settings.STRICT or not same or not 0 <= age < RESTARTED_SECONDS:
        return None
    say(f"this container was refused {age:.0f} s ago; after {RESTARTED_SECONDS:g} s a start validates anew")
    _write(options.run / REPORT, document)
    return document


def _identity(server: ServerCommand) -> list[str]:
    return [socket.gethostname(), *server.command(sys.executable)]  # a container's host name is its id by default


def _clear(run: Path) -> None:
    """Remove what an earlier start left: nobody may take its verdict for this one's. Raises StorageError."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        for name in (READY, REPORT, textfile.NAME):
            (run / name).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(run, error) from error


def _write(path: Path, value: Mapping[str, Any] | bytes, *, mode: int = 0o644) -> None:
    """Write a file of the run folder: bytes as they are, anything else as JSON. Raises StorageError."""
    try:
        write_atomic(path, value, mode=mode) if isinstance(value, bytes) else write_json(path, value, mode=mode)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(run: Path, error: OSError) -> StorageError:
    why = f"{error.strerror or error} (running as uid {os.getuid()})"
    return StorageError(
        f"cannot write into {run}",
        why,
        f"mount a tmpfs there: --tmpfs {run}:mode=1777, or set SPARKFORGE_RUN",
        code="storage.access",
    )


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """End at SIGTERM; as a container's first process there is no default that would."""
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
