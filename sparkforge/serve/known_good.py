"""Which starts are known to be good: one JSON record in the state folder, newest first, for `./inv rollback`.

A start is recorded once its validation passed and it has proved what clients call (`sparkforge.serve.proof`): for a
container with the image's id and the Compose project as it was resolved, for the embedded device with the hash of its
environment and the plan. No secret is in it: of a key the file's path, of a variable that looks like a secret its name.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.documents import read_json
from sparkforge.core.errors import ProcessError, SparkforgeError, StorageError, UsageError
from sparkforge.core.files import write_json
from sparkforge.core.git import checkout_git
from sparkforge.core.redact_rules import TOKEN, is_secret_name, secrets
from sparkforge.serve.plan import StartPlan
from sparkforge.serve.record import Server, require_ours

HISTORY = 10  # starts that are kept, and their images (`sparkforge.image.versions`)


@dataclass(frozen=True)
class KnownGood:
    """A start that proved itself at `time`, in Unix time, while the checkout was at the commit `revision`.

    A container's has the `image`'s id, its own `name`, the `digests` where it was published, the folder `cache` of its
    compiled code in `volume`, and the resolved Compose `project`. An embedded one has the hash of its `environment`
    and its `plan`.
    """

    time: float
    device: str
    stack: str
    model_id: str
    profile: str
    port: int
    revision: str = ""
    image: str = ""
    name: str = ""
    digests: list[str] = field(default_factory=list)
    cache: str = ""
    volume: str = ""
    project: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    plan: StartPlan | None = None

    @property
    def identity(self) -> str:
        """Hash of what makes one start differ from another: everything but when it was."""
        return hashed(asdict(replace(self, time=0.0, revision="", digests=[], name="")))

    @property
    def title(self) -> str:
        """What it was and when, in one line."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        kind = self.name.rpartition(":")[2] or f"environment {self.environment[:12]}"
        return f"{when} · {self.device} · {kind} · profile {self.profile} · {self.model_id} on port {self.port}"


STARTS = TypeAdapter(list[KnownGood])


def record_path() -> Path:
    """Return where the record lies."""
    return paths.state() / "known-good.json"


def intent_path() -> Path:
    """Return where a rollback notes what it goes back to, until a start has proved itself."""
    return paths.state() / "rollback.json"


def project_path() -> Path:
    """Return where a rollback writes the Compose project for the time of its start, with what the record leaves out."""
    return paths.state() / "rollback.compose.json"


def read() -> list[KnownGood]:
    """Return the recorded starts, newest first.

    Raises StorageError for a record that cannot be read, or that somebody else may have written: it says what is run.
    """
    path = record_path()
    try:
        require_ours(path, path.lstat())
        starts = STARTS.validate_python(read_json(path)["starts"])
        return [
            start for start in starts if start.image or start.plan
        ]  # older embedded ones have no plan to start again
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        failure, reason = f"cannot read the known good starts in {path}", " ".join(str(error).split())[:300]
        fix = f"move it away: mv {path} {path}.broken; the next ./inv up begins a new one"
        raise StorageError(failure, reason, fix, code="storage.access") from error


def add(start: KnownGood) -> None:
    """Record a start as the newest; one with the same content goes away, and so does what HISTORY has no room for."""
    others = [entry for entry in read() if entry.identity != start.identity]
    paths.secure_state()
    starts = STARTS.dump_python([start, *others][:HISTORY], mode="json")
    write_json(record_path(), {"schema": 1, "starts": starts}, mode=0o600)
    intent_path().unlink(missing_ok=True)


def remember(start: KnownGood) -> None:
    """Record a start, or say why not: a server that serves is not ended because a disk is full."""
    try:
        add(start)
    except (OSError, SparkforgeError) as error:
        say_unrecorded(error)


def say_unrecorded(error: Exception) -> None:
    """Say that a start is not recorded, and why."""
    say(f"WARNING: this start is not recorded as known good, so ./inv rollback cannot come back to it: {error}")


def started(server: Server, stack: str, **more: Any) -> KnownGood:
    """Return the entry of a proved server, with what only its device knows in `more`."""
    return KnownGood(
        time=server.proved,
        device=server.device,
        stack=stack,
        model_id=server.model_id,
        profile=server.profile,
        port=server.port,
        revision=revision(),
        **more,
    )


def without_secrets(project: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved project in which each variable that looks like a secret has TOKEN for a value."""
    document: dict[str, Any] = json.loads(json.dumps(project))
    for service in document.get("services", {}).values():
        environment = service.get("environment") or {}
        for name, value in environment.items():
            text = str(value or "")
            # A pattern finds more than secrets, such as any flag with its value: what it replaces is one.
            known = any(pattern.sub(replacement, text) != text for pattern, replacement in secrets())
            if known or (text and is_secret_name(name) and not Path(text).is_absolute()):
                environment[name] = TOKEN
    return document


def with_secrets(project: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded project with the values that were left out, which the `current` settings have.

    Raises UsageError for one that they lack.
    """
    document: dict[str, Any] = json.loads(json.dumps(project))
    for name, service in document.get("services", {}).items():
        environment = service.get("environment") or {}
        present = current["services"][name].get("environment") or {}
        for variable in (variable for variable, value in environment.items() if value == TOKEN):
            if not present.get(variable):
                why = "it looks like a secret, so its value was not recorded, and the settings of now have none"
                raise UsageError(f"{variable} has no value", why, f"{variable}=… ./inv rollback")
            environment[variable] = present[variable]
    return document


def images() -> dict[str, str]:
    """Return the images of the recorded starts, id → words: `image.clean` leaves them."""
    dates = {entry.image: time.strftime("%Y-%m-%d", time.localtime(entry.time)) for entry in reversed(read())}
    return {image: f"known good on {date}" for image, date in dates.items() if image}


def hashed(inputs: Mapping[str, Any]) -> str:
    """Return the hash of what something is made from."""
    return hashlib.sha256(json.dumps(dict(inputs), sort_keys=True).encode()).hexdigest()


def revision() -> str:
    """Return the checkout's commit; empty without git."""
    with suppress(ProcessError):
        return checkout_git(paths.ROOT, "rev-parse", "HEAD").strip()
    return ""
