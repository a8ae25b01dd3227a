"""Known good starts, and `./inv rollback`, which goes back to one of them.

A start is recorded once it passed validation and the start-up test: its plan, with the image's id, or the hash of the
embedded device's environment. Of a key, only the file's path is kept. A rollback checks that everything the start needs
is there before it ends the running server. The old start must pass the same tests as with `up`. After that it is
recorded, and its image gets the tag that Compose serves.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sparkforge import environments, pins
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.errors import EngineError, ProcessError, ServerError, SparkforgeError, StorageError, with_remark
from sparkforge.core.files import read_json, write_json
from sparkforge.core.git import checkout_git
from sparkforge.environments import Environment
from sparkforge.image import compose
from sparkforge.serve import access, launch, record
from sparkforge.serve.record import Server, StartPlan
from sparkforge.serve.settings import NUMBERS

NAME = "known-good.json"
HISTORY = 10  # starts that are kept, and their images (`sparkforge.image.versions`)
LIST = "./inv rollback --list"
Starter = Callable[[StartPlan], Callable[[], Server]]


@dataclass(frozen=True)
class KnownGood:
    """A start that passed its test at `time`, in Unix time; with its image's name and digests or environment's hash."""

    time: float
    plan: StartPlan
    model_id: str
    revision: str = ""
    environment: str = ""
    name: str = ""
    digests: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The start and its time, in one line."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        kind = self.name.rpartition(":")[2] or f"environment {self.environment[:12]}"
        served = f"profile {self.plan.profile} · {self.model_id} on port {self.plan.port}"
        return f"{when} · {self.plan.device} · {kind} · {served}"


STARTS = TypeAdapter(list[KnownGood])


def intent_path() -> Path:
    """Return the file that has a rollback's target until that start has passed its test."""
    return paths.state() / "rollback.json"


def read() -> list[KnownGood]:
    """Return the recorded starts, newest first. Raises StorageError for a record that others may have written."""
    path = paths.state() / NAME
    try:
        record.require_ours(path, path.lstat())
        return STARTS.validate_python(read_json(path)["starts"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        failure, reason = f"cannot read the known good starts in {path}", " ".join(str(error).split())[:300]
        fix = f"mv {path} {path}.broken   # the next ./inv up begins a new one"
        raise StorageError(failure, reason, fix, code="storage.access") from error


def add(start: KnownGood) -> None:
    """Record a start as the newest; remove one with the same content, and those beyond HISTORY."""
    others = [entry for entry in read() if (entry.plan, entry.environment) != (start.plan, start.environment)]
    paths.secure_state()
    starts = STARTS.dump_python([start, *others][:HISTORY], mode="json")
    write_json(paths.state() / NAME, {"starts": starts}, mode=0o600)
    intent_path().unlink(missing_ok=True)


def remember(server: Server, plan: StartPlan, **more: Any) -> None:
    """Record the start of a proved server; `more` is what only its device knows. Raises what `add` raises."""
    numbers = {name: plan.variables[name] for name in NUMBERS if plan.variables.get(name)}
    plan = replace(plan, profile=server.profile, key="", key_file=plan.key_file or None, variables=numbers)
    revision = ""
    with suppress(ProcessError):  # a checkout without git
        revision = checkout_git(paths.ROOT, "rev-parse", "HEAD").strip()
    add(KnownGood(server.proved, plan, server.model_id, revision, **more))


def hashed(inputs: Mapping[str, Any]) -> str:
    """Return the hash of an environment's inputs."""
    return hashlib.sha256(json.dumps(dict(inputs), sort_keys=True).encode()).hexdigest()


def roll_back(starter: Starter, number: int = 0, *, dry_run: bool = False) -> Server | None:
    """Go back to start `number`, else to the one before the running one; with `dry_run` only print the changes.

    `starter` checks a plan and returns the function that starts it. Raises ServerError if something is missing, and
    then changes nothing, or if the start fails, and then no server runs.
    """
    from sparkforge.image import engine, versions  # noqa: PLC0415 - the Docker SDK takes half a second to load

    server, starts = record.read(), read()
    running = server if server and server.alive else None
    start = _choose(starts, number, running)
    plan = start.plan
    say(f"back to the start of {start.title}")
    try:
        for change in _changes(start, starts[0]):
            say(f"  {change}")
        run = starter(plan)
        if plan.key_file:
            access.read_key(Path(plan.key_file), private=not plan.image)
        if not ((running and running.port == plan.port) or record.begun_path().exists()):
            launch.check_port(plan.port, plan.address)
    except SparkforgeError as error:
        fix = with_remark(error.fix, f"or another start: {LIST}")
        raise _failed(f"cannot go back: {error.what}", error.why, fix) from error
    if dry_run:
        return None
    with record.remembered(), launch.alone():
        if running and running.proved == start.time:
            say("the running server is that start, and keeps running")
        else:
            write_json(intent_path(), {"to": start.time})
            try:
                if (server and (server.alive or server.container)) or record.leftovers():
                    launch.stop()
                launch.make_ready()
                server = run()
            except SparkforgeError as error:
                intent_path().unlink(missing_ok=True)
                text = f"the rollback failed, and no server runs: {error.what}"
                why = f"{error.why}; the record of known good starts and the tag of the image are as they were"
                fix = with_remark(error.fix, f"or another start: {LIST}")
                raise ServerError(text, why, fix, code="server.rollback") from error
        if plan.image:
            name = compose.resolve(compose.variables(plan.stack)).image
            with engine.connected() as client:
                versions.move_tags(client.images.get(plan.image), name)
            say(f"{name} is {start.name}")
    return server


def _failed(failure: str, why: str, fix: str = LIST) -> ServerError:
    return ServerError(failure, f"{why}; nothing was changed", fix, code="server.rollback")


def _choose(starts: list[KnownGood], number: int, running: Server | None) -> KnownGood:
    """Return start `number`, that of an interrupted rollback, the newest, or the one before if the newest runs."""
    if not starts:
        raise _failed("there is no known good start", "./inv up records a start that passed its proof", "./inv up")
    if number:
        if not 0 < number <= len(starts):
            raise _failed(f"there is no known good start {number}", f"there are {len(starts)}")
        return starts[number - 1]
    with suppress(OSError, ValueError, KeyError, TypeError):
        wanted = read_json(intent_path())["to"]
        if start := next((start for start in starts if start.time == wanted), None):
            say("a rollback was interrupted; this one goes on to the same start")
            return start
    newest = starts[0]
    if running is None or running.proved != newest.time or (newest.plan.image and _tagged(newest) != newest.plan.image):
        return newest
    if len(starts) == 1:
        raise _failed("there is no start to go back to", "the only known good one runs")
    return starts[1]


def _tagged(start: KnownGood) -> str:
    from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

    name = compose.resolve(compose.variables(start.plan.stack)).image
    with engine.connected() as client, suppress(EngineError):
        return str(engine.image(client, name, "").id)
    return ""


def _changes(start: KnownGood, newest: KnownGood) -> Iterator[str]:
    """Yield the changes of a rollback. Raises an error for an image or an environment that no longer exists."""
    from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

    plan = start.plan
    if plan.image:
        with engine.connected() as client:
            fix = f"./inv image.pull {start.digests[0]}" if start.digests else "./inv up"
            engine.require_image(client, plan.image, engine.read(client).platform, fix)
        if (tagged := _tagged(start)) != plan.image:
            yield f"image: {tagged[:19] or 'missing'}, will be {start.name}"
    else:
        # Each name has one environment, made from the locks of the checkout.
        inputs = environments.inputs(Environment(plan.stack), pins.load())
        if hashed(inputs) != start.environment:
            why = "the environment was made from other locks than this checkout has"
            fix = f"git checkout {start.revision[:12] or 'HEAD~1'} && ./inv rollback"
            raise ServerError("that start is of another checkout", why, fix, code="server.rollback")
        yield f"environment: {plan.stack} {start.environment[:12]}"
    for name, value in vars(plan).items():
        if name != "image" and value != (before := getattr(newest.plan, name)):
            yield f"{name}: {before!r}, will be {value!r}"
