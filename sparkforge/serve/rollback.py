"""`./inv rollback`: go back to a start that is known to be good, all of it together, or change nothing.

Everything that the start needs is looked for before anything is stopped. Then the server that runs is ended and the old
one started and proved as `up` does. Only when it has proved itself is it recorded and does its image get the tag that
Compose serves: whatever ends the rollback before that, tag and record are as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound, NotFound

from sparkforge import environments, pins
from sparkforge.core import paths
from sparkforge.core.console import echo, say
from sparkforge.core.documents import read_json
from sparkforge.core.errors import ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_json
from sparkforge.environments import Environment
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine, versions
from sparkforge.image.compose import SERVICE
from sparkforge.serve import access, known_good, launch, record
from sparkforge.serve.devices import device
from sparkforge.serve.devices.container import Container
from sparkforge.serve.devices.device import Device
from sparkforge.serve.devices.embedded import Embedded, profile_named
from sparkforge.serve.known_good import KnownGood
from sparkforge.serve.plan import StartPlan
from sparkforge.serve.record import Server

UNCHANGED = "the record of known good starts and the tag of the image are as they were"
LIST = "./inv rollback --list"


@dataclass(frozen=True)
class RollbackPlan:
    """What a rollback goes back to, the changes in words, and whether the server that runs is that start already."""

    start: KnownGood
    changes: tuple[str, ...]
    serves: bool


class RecordedContainer(Container):
    """The container of a known good start, as it was recorded, its image by id."""

    step_count = 1

    def __init__(self, start: KnownGood) -> None:
        Device.__init__(self, StartPlan(start.device))
        self.env, self.known_good = {}, start
        current = docker_compose.resolved(docker_compose.variables(start.stack))
        project = known_good.with_secrets(start.project, current)
        self.service = docker_compose.service_of(project)
        project["services"][SERVICE]["image"] = start.image
        self.project = project

    def prepare(self) -> None:
        """Everything is there: `plan` has looked."""

    def start(self) -> Server:
        """Start it by a file that is there for the time of the start."""
        paths.secure_state()
        file = known_good.project_path()
        write_json(file, self.project, mode=0o600)
        try:
            with self.steps.step("container", self.known_good.name) as tell:
                return self.serve(tell, file)
        finally:
            file.unlink(missing_ok=True)  # after a kill `launch.starting` does it

    def remember(self, server: Server) -> None:
        """Record it again, as the newest start."""
        known_good.remember(replace(self.known_good, time=server.proved))


def show_list() -> None:
    """Print the known good starts, newest first, with the size of each image that is still here."""
    starts = known_good.read()
    sizes: dict[str, str] = {}
    with suppress(SparkforgeError), engine.connected() as client:  # without an engine there is no image here
        for image in {start.image for start in starts if start.image}:
            with suppress(ImageNotFound):
                sizes[image] = f"{int(client.images.get(image).attrs.get('Size', 0)) / 1e9:.2f} GB"
    for number, start in enumerate(starts, 1):
        echo(f"{number}  {start.title}" + (f" · {sizes.get(start.image, 'its image is gone')}" if start.image else ""))
    if not starts:
        say("no start is known to be good yet: ./inv up records one that proved itself")


def plan(number: int = 0) -> RollbackPlan:
    """Return what a rollback would do, to known good start `number`, else to the one before what runs.

    Nothing is changed. Raises ServerError if there is nothing to go back to, and for the first thing that is missing.
    """
    server = record.read()
    running = server if server and server.proved and server.alive else None
    start = _choose(known_good.read(), number, running)
    changes = tuple(_container_changes(start) if start.image else _embedded_changes(start))
    if not ((server and server.alive and server.port == start.port) or (start.image and _service_runs())):
        address = start.plan.address if start.plan else docker_compose.service_of(start.project).host
        launch.check_port(start.port, address)
    return RollbackPlan(start, changes, serves=running is not None and running.proved == start.time)


def show(plan: RollbackPlan) -> None:
    """Say what a rollback goes back to and what it changes."""
    say(f"back to the start of {plan.start.title}")
    for change in plan.changes:
        say(f"  {change}")
    if plan.serves:
        say("  the server that runs is that start already, and goes on")


def perform(plan: RollbackPlan) -> Server:
    """Do what the plan says and return the server that serves then.

    Raises ServerError if the start does not prove itself, nothing runs then; StorageError, and nothing was changed, if
    another command starts a server or goes back.
    """
    start = plan.start
    with launch.alone():
        server = record.read()
        if not (plan.serves and server):
            server = _replace(server, start)
        if start.image:
            name = docker_compose.service_of(start.project).image
            with engine.connected() as client:
                versions.move_tags(client, client.images.get(start.image), name)
            say(f"{name} is {start.name}")
    return server


def _replace(server: Server | None, start: KnownGood) -> Server:
    """End the server that runs, if one does, and return the one of `start`. Raises ServerError; nothing runs then."""
    write_json(known_good.intent_path(), {"to": start.identity}, mode=0o600)
    try:
        if (server and (server.alive or server.container)) or record.leftovers():
            launch.stop()
        if start.image and _service_runs():
            docker_compose.down({})
        launch.make_ready()
        return device.run(RecordedContainer(start) if start.plan is None else Embedded(start.plan))
    except SparkforgeError as error:
        known_good.intent_path().unlink(missing_ok=True)
        failure, fix = (
            f"the rollback failed, and no server runs: {error.what}",
            f"{error.fix}; or another start: {LIST}",
        )
        raise ServerError(failure, f"{error.why}; {UNCHANGED}", fix, code="server.rollback") from error


def _service_runs() -> bool:
    """Tell whether a container of the service runs, perhaps of a killed command that did not come to record it."""
    with engine.connected() as client:
        container_id = engine.service_container(client, docker_compose.project(), SERVICE)
        state = engine.state(client, container_id) if container_id else None
    return state is not None and state.runs


def _choose(starts: list[KnownGood], number: int, running: Server | None) -> KnownGood:
    """Return the start to go back to: the one asked for, the one an interrupted rollback had, or the last before now.

    What runs is "now" if it is the newest known good start; else the newest one is the last before now. A newer image
    that was built and not started yet counts as now, too.
    """
    if not starts:
        raise _impossible("there is no known good start", "./inv up records one that proved itself", "./inv up")
    if number:
        if not 0 < number <= len(starts):
            raise _impossible(f"there is no known good start {number}", f"there are {len(starts)}", LIST)
        return starts[number - 1]
    with suppress(OSError, ValueError, KeyError, TypeError):
        wanted = read_json(known_good.intent_path())["to"]
        interrupted = [start for start in starts if start.identity == wanted]
        if interrupted:
            say("a rollback was interrupted; this one goes on to the same start")
            return interrupted[0]
    newest = starts[0]
    if running is None or running.proved != newest.time or (newest.image and _tagged(newest) != newest.image):
        return newest
    if len(starts) == 1:
        raise _impossible("there is no start to go back to", "the only known good one runs", LIST)
    return starts[1]


def _tagged(start: KnownGood) -> str:
    """Return the id of the image that has the tag which Compose serves now; empty if none has."""
    with engine.connected() as client, suppress(ImageNotFound):
        return str(client.images.get(docker_compose.service_of(start.project).image).id)
    return ""


def _container_changes(start: KnownGood) -> Iterator[str]:
    """Yield what going back to a container's start changes. Raises ServerError for the first thing that is missing."""
    service = docker_compose.service_of(start.project)
    with engine.connected() as client:
        docker_engine = engine.read(client)
        try:
            image = client.images.get(start.image)
        except ImageNotFound:
            fix = f"./inv image.pull {start.digests[0]}" if start.digests else LIST
            raise _impossible(f"the image {start.name} is gone", "somebody removed it", fix) from None
        if (built_for := engine.platform_of(image.attrs)) != docker_engine.platform:
            why = f"it is {built_for}, the engine is {docker_engine.platform}"
            raise _impossible(f"{start.name} is for another platform", why, LIST)
        if service.gpus:
            docker_engine.require_gpu()
        tagged = _tagged(start)
        if tagged != start.image:
            yield f"image: {service.image} is {tagged[:19] or 'missing'}, will be {start.name}"
        yield f"compiled code: {start.cache} in the volume {start.volume or '(none)'}, {_has_volume(client, start)}"
    if service.key_file:
        access.read_key(Path(service.key_file), private=False)
    mounts = start.project["services"][SERVICE].get("volumes") or []
    sources = [str(mount.get("source")) for mount in mounts if mount.get("type") == "bind"]
    sources += [secret["file"] for secret in (start.project.get("secrets") or {}).values() if "file" in secret]
    if missing := [source for source in sources if not Path(source).exists()]:
        raise _impossible(f"{missing[0]} is gone", "the container had it mounted", LIST)
    current = docker_compose.resolved(docker_compose.variables(start.stack))
    known_good.with_secrets(start.project, current)
    newest = known_good.read()[0]
    compared = newest.project if newest.project and newest != start else known_good.without_secrets(current)
    before, after = (dict(project["services"][SERVICE]) for project in (compared, start.project))
    for settings in (before, after):
        for key in ("image", "build", "depends_on"):
            settings.pop(key, None)
    yield from _differences(before, after)
    now = known_good.revision()
    if start.revision and now and start.revision != now:
        yield (
            f"the checkout stays at {now[:12]}, then it was at {start.revision[:12]}: this start has its own Compose "
            "project, a later `docker compose up` has the checkout's"
        )


def _has_volume(client: docker.DockerClient, start: KnownGood) -> str:
    try:
        client.volumes.get(start.volume or "-")
    except NotFound:
        return "which is gone: the start compiles what the image does not hold"
    return "which is there"


def _embedded_changes(start: KnownGood) -> Iterator[str]:
    """Yield what going back to an embedded start changes. Raises ServerError for the first thing that is missing.

    There is one environment of a name, made from the locks of the checkout: an older one is made again from older ones.
    """
    plan = start.plan or StartPlan(start.device)
    env = Environment(start.stack)
    inputs = environments.inputs(env, pins.load())
    if known_good.hashed(inputs) != start.environment:
        why = "its environment was made from other locks than this checkout has"
        fix = f"git checkout {start.revision[:12] or 'THE COMMIT OF THEN'}, then ./inv rollback"
        raise _impossible("cannot go back to that start from this checkout", why, fix)
    availability = "is there" if environments.is_complete(env, inputs) else "is made again"
    yield f"environment: {start.stack} {start.environment[:12]}, {availability}"
    try:
        profile_named(start.profile)
    except UsageError as error:
        raise _impossible(f"the profile {start.profile} is gone", error.why, LIST) from error
    if plan.model and not Path(plan.model).is_dir():
        raise _impossible(f"the model {plan.model} is gone", "there is no such folder", LIST)
    if plan.key_file:
        access.read_key(Path(plan.key_file))
    newest = known_good.read()[0].plan or plan
    yield from _differences(vars(newest), vars(plan))


def _differences(current: Mapping[str, Any], target: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings in which two starts differ, each in a line."""
    for key in sorted({*current, *target}):
        before, after = current.get(key), target.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}: {before!r}, will be {after!r}"


def _impossible(failure: str, why: str, fix: str) -> ServerError:
    return ServerError(failure, f"{why}; nothing was changed", fix, code="server.rollback")
