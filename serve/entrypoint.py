"""`python3 -m serve.entrypoint [vLLM's arguments]`: the container's program. It validates, then becomes the server.

The validator's report goes to the log, to SPARKFORGE_RUN/validation.json and to a Prometheus textfile beside it. Only
after a verdict that lets the server start is there a readiness file, and this process replaces itself by vLLM's API
server, so that signals reach it. Every failed validation ends with exit code 30 (docs/validation.md, "In the image").
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from serve import profiles, settings
from serve.healthy import READY
from serve.settings import Settings
from sparkforge import paths
from sparkforge.console import say, show_error
from sparkforge.errors import SparkforgeError, StorageError, ValidationFailedError
from sparkforge.files import write_atomic, write_json
from validate import textfile
from validate.bounded import ProbeError, ending, watch
from validate.facts import SCHEMA
from validate.finding import Status
from validate.gate import Verdict

REPORT = "validation.json"
REFUSED = "refused.json"  # in SPARKFORGE_STATE, which must outlive the container's tmpfs to be of use
# Docker restarts after 0.1, 0.2, 0.4 s …: within this time a new start is the restart policy's, later a person's.
RESTARTED_SECONDS = 15.0
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Server:
    """What this process will become: the command, its whole environment, and where it listens."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    port: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments for vLLM, which the validator judges too."""
        return self.command[3:]


def main(words: Sequence[str]) -> int:
    """Validate and become the server; returns an exit code only if that did not come about."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        told = settings.read(os.environ)
        _clear(told.run)
        server = plan(told, words)
        admit(told, server)
        _write(told.run / READY, {"host": _reachable(server.host), "port": server.port, "validated": told.mode})
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return become(server)


def become(server: Server) -> NoReturn:
    """Replace this process by the server: same process id, so that signals and the exit code are the server's own."""
    say(f"vLLM's API server starts on {server.host}:{server.port}")
    os.execvpe(server.command[0], server.command, dict(server.environment))  # noqa: S606 - that is what it is for


def plan(told: Settings, words: Sequence[str]) -> Server:
    """Return the server that `told` and the arguments describe; the arguments come last and win.

    Writes the tiny model if that is asked for. Raises what `profiles.named`, `settings.secrets` and `write_tiny` raise.
    """
    profile = profiles.named(told.serve_profile)
    environment = {**settings.STEADY, **profile.variables(), **os.environ, **settings.secrets(os.environ)}
    model = _tiny() if told.model == settings.TINY else told.model
    flags = ["--model", model, "--served-model-name", told.model_id, "--host", "0.0.0.0", "--port", "8000"]  # noqa: S104 - the container's own network; compose publishes it on 127.0.0.1
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *profile.words(), *words)
    host, port = (settings.argument(command, name) for name in ("--host", "--port"))
    return Server(command, environment, host, settings.port(port))


def admit(told: Settings, server: Server) -> None:
    """Let the server start or raise ValidationFailedError; the report and the textfile are written either way."""
    if told.mode == settings.OFF:
        say("WARNING: SPARKFORGE_VALIDATE=off, so nothing was validated")
        return
    document = _refused_just_now(told, server) or validate(told, server)
    _write(told.run / textfile.NAME, textfile.text(document, told.mode))
    if document["verdict"] == Verdict.SERVE:
        return
    if told.mode == settings.WARN:
        say(f"WARNING: {_summary(document)}; SPARKFORGE_VALIDATE=warn lets the server start all the same")
        return
    _remember(server, document)
    raise ValidationFailedError(
        "the validator refuses to serve", _summary(document), f"{_first_fix(document)}; then: docker compose up -d"
    )


def validate(told: Settings, server: Server) -> dict[str, Any]:
    """Run the validator in a process of its own, which may hang, and return its report as a JSON document."""
    report = told.run / REPORT
    command: list[str | Path] = [sys.executable, "-m", "validate", "--profile", told.profile, "--json", report]
    command += ["--serve-args", *server.arguments]
    try:
        code = watch(command, seconds=told.seconds, env=server.environment)
        why = f"did not end within {told.seconds:g} s" if code is None else ending(code)
    except ProbeError as error:
        code, why = None, str(error)
    try:
        document: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        if document["exit_code"] == code:
            return document
        why = f"{why}, its report says {document['exit_code']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{why} and left no report ({type(error).__name__})"
    return _no_answer(told, report, f"the validator {why}")


def _no_answer(told: Settings, report: Path, why: str) -> dict[str, Any]:
    """Write and return the report of a validator that gave none: refused."""
    finding = {
        "check": "validator",
        "status": str(Status.FAIL),
        "required": True,
        "evidence": why,
        "fix": "nvidia-smi   # if that hangs too, reboot; longer: SPARKFORGE_VALIDATE_SECONDS=1200",
        "doc": "docs/validation.md#in-the-image",
    }
    document = {
        "schema": SCHEMA,
        "profile": told.profile,
        "verdict": str(Verdict.REFUSE),
        "exit_code": ValidationFailedError.exit_code,
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
    told = "; ".join(f"{finding['check']}: {finding['evidence']}" for finding in worst[:3])
    return told + (f"; and {len(worst) - 3} more" if len(worst) > 3 else "")


def _first_fix(document: Mapping[str, Any]) -> str:
    return str(next((finding["fix"] for finding in _refusing(document)), "docker compose logs vllm"))


def _refusing(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    failed = [finding for finding in document["findings"] if finding["status"] == Status.FAIL]
    return failed or [f for f in document["findings"] if f["status"] == Status.SKIPPED and f["required"]]


def _remember(server: Server, document: Mapping[str, Any]) -> None:
    """Keep a refusal for a restart that comes by itself; where there is no lasting folder, it is asked again."""
    kept = {"for": _identity(server), "ended": time.time(), "document": document}
    with suppress(OSError):
        write_json(paths.state() / REFUSED, kept)


def _refused_just_now(told: Settings, server: Server) -> dict[str, Any] | None:
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
    if told.mode != settings.STRICT or not same or not 0 <= age < RESTARTED_SECONDS:
        return None
    say(f"this container was refused {age:.0f} s ago; after {RESTARTED_SECONDS:g} s a start validates anew")
    _write(told.run / REPORT, document)
    return document


def _identity(server: Server) -> list[str]:
    return [socket.gethostname(), *server.command]  # a container's host name is its id unless told otherwise


def _tiny() -> str:
    from serve.tiny import write_tiny  # noqa: PLC0415 - numpy and the vocabulary, for this model only

    return str(write_tiny(paths.state() / "models" / settings.TINY_ID))


def _clear(run: Path) -> None:
    """Remove what an earlier start left: nobody may take its verdict for this one's. Raises StorageError."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        for name in (READY, REPORT, textfile.NAME):
            (run / name).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(run, error) from error


def _write(path: Path, value: Mapping[str, Any] | bytes) -> None:
    """Write a file of the run folder: bytes as they are, anything else as JSON. Raises StorageError."""
    try:
        write_atomic(path, value) if isinstance(value, bytes) else write_json(path, value)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(run: Path, error: OSError) -> StorageError:
    why = f"{error.strerror or error} (running as uid {os.getuid()})"
    return StorageError(
        f"cannot write into {run}", why, f"mount a tmpfs there: --tmpfs {run}:mode=1777, or set SPARKFORGE_RUN"
    )


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared with, not bound


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """End at SIGTERM; as a container's first process there is no default that would."""
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
