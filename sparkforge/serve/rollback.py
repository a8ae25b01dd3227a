"""`./inv rollback`: go back to a start that is known to be good, all of it together, or change nothing.

Everything that the start needs is looked for before anything is stopped. Then the server that runs is ended and the old
one started and proved as `up` does. Only when it has proved itself is it recorded and does its image get the tag that
Compose serves: whatever ends the rollback before that, tag and record are as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound, NotFound

from sparkforge import environments, pins
from sparkforge.core.console import Steps, echo, say
from sparkforge.core.documents import read_json
from sparkforge.core.errors import ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_json
from sparkforge.environments import Environment
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine, inspect, versions
from sparkforge.image.compose import SERVICE
from sparkforge.serve import access, container, embedded, environment, known_good, launch, record
from sparkforge.serve.known_good import KnownGood
from sparkforge.serve.plan import LOOPBACK, StartPlan
from sparkforge.serve.record import Server

UNCHANGED = "the record of known good starts and the tag of the image are as they were"
LIST = "./inv rollback --list"


@dataclass(frozen=True)
class RollbackPlan:
    """What a rollback goes back to, the changes in words, and whether the server that runs is that start already."""

    start: KnownGood
    changes: tuple[str, ...]
    serves: bool


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
    starts, server = known_good.read(), record.read()
    running = server if server and server.proved and server.alive else None
    start = _choose(starts, number, running)
    serves = running is not None and running.proved == start.time
    changes = _container_changes(start) if start.image else _embedded_changes(start)
    if not ((server and server.alive and server.port == start.port) or (start.image and _left())):
        launch.check_port(start.port, _host(start))
    return RollbackPlan(start, tuple(changes), serves)


def show(plan: RollbackPlan) -> None:
    """Say what a rollback goes back to and what it changes."""
    say(f"back to the start of {plan.start.title}")
    for change in plan.changes:
        say(f"  {change}")
    if plan.serves:
        say("  the server that runs is that start already, and goes on")


def perform(plan: RollbackPlan, steps: Steps) -> Server:
    """Do what the plan says and return the server that serves then.

    Raises ServerError if the start does not prove itself, nothing runs then; StorageError, and nothing was changed, if
    another command starts a server or goes back.
    """
    start = plan.start
    with launch.alone():
        server = record.read()
        if not (plan.serves and server):
            server = _replace(server, start, steps)
            known_good.add(replace(start, time=server.proved))
        if start.image:
            name = _served_name(start)
            with engine.connected() as client:
                image = client.images.get(start.image)
                versions.move_tags(client, image, name)
            say(f"{name} is {start.name}")
    return server


def _replace(server: Server | None, start: KnownGood, steps: Steps) -> Server:
    """End the server that runs, if one does, and return the one of `start`. Raises ServerError; nothing runs then."""
    write_json(known_good.intent_path(), {"to": start.identity}, mode=0o600)
    try:
        if (server and (server.alive or server.container)) or record.leftovers():
            launch.stop()
        if start.image and _left():
            docker_compose.down({})
        launch.make_ready()
        return container.start_again(start, steps) if start.image else _start_embedded(start, steps)
    except SparkforgeError as error:
        known_good.intent_path().unlink(missing_ok=True)
        fix = f"{error.fix}; or another start: {LIST}"
        failure = f"the rollback failed, and no server runs: {error.what}"
        raise ServerError(failure, f"{error.why}; {UNCHANGED}", fix, code="server.rollback") from error


def _left() -> bool:
    """Tell whether a container of the service runs, perhaps of a killed command that did not come to record it."""
    with engine.connected() as client:
        container_id = engine.service_container(client, docker_compose.project(), SERVICE)
        state = engine.state(client, container_id) if container_id else None
    return state is not None and state.runs


def _choose(starts: Sequence[KnownGood], number: int, running: Server | None) -> KnownGood:
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
        for start in starts:
            if start.identity == wanted:
                say("a rollback was interrupted; this one goes on to the same start")
                return start
    newest = starts[0]
    if running is None or running.proved != newest.time or (newest.image and _tagged(newest) != newest.image):
        return newest
    if len(starts) == 1:
        raise _impossible("there is no start to go back to", "the only known good one runs", LIST)
    return starts[1]


def _tagged(start: KnownGood) -> str:
    """Return the id of the image that has the tag which Compose serves now; empty if none has."""
    with engine.connected() as client:
        try:
            return str(client.images.get(_served_name(start)).id)
        except ImageNotFound:
            return ""


def _served_name(start: KnownGood) -> str:
    return docker_compose.service_of(start.project).image


def _container_changes(start: KnownGood) -> Iterator[str]:
    """Yield what going back to a container's start changes. Raises ServerError for the first thing that is missing."""
    project = start.project
    service = docker_compose.service_of(project)
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
            now = _own_name(client, tagged, start)
            yield f"image: {service.image} is {now}, will be {start.name}"
        yield f"compiled code: {start.cache} in the volume {start.volume or '(none)'}, {_cache(client, start)}"
    if service.key_file:
        access.read_key(Path(service.key_file), private=False)
    _require_mounts(project)
    current = docker_compose.resolved(docker_compose.variables(start.stack))
    known_good.with_secrets(project, current)
    newest = known_good.read()[0]
    compared = newest if newest.project and newest != start else None
    now_project = compared.project if compared else known_good.without_secrets(current)
    yield from _differences(now_project, project)
    yield from _checkout(start)


def _embedded_changes(start: KnownGood) -> Iterator[str]:
    """Yield what going back to an embedded start changes. Raises ServerError for the first thing that is missing.

    There is one environment of a name, made from the locks of the checkout: an older one is made again from older ones.
    """
    table = pins.load()
    env = Environment(start.stack)
    inputs = environments.inputs(env, table)
    if known_good.hashed(inputs) != start.environment:
        why = "its environment was made from other locks than this checkout has"
        fix = f"git checkout {start.revision[:12] or 'THE COMMIT OF THEN'}, then ./inv rollback"
        raise _impossible("cannot go back to that start from this checkout", why, fix)
    availability = "is there" if environments.is_complete(env, inputs) else "is made again"
    yield f"environment: {start.stack} {start.environment[:12]}, {availability}"
    try:
        embedded.profile_named(start.profile)
    except UsageError as error:
        raise _impossible(f"the profile {start.profile} is gone", error.why, LIST) from error
    if (folder := start.settings.get("model")) and not Path(folder).is_dir():
        raise _impossible(f"the model {folder} is gone", "there is no such folder", LIST)
    if path := start.settings.get("key_file"):
        access.read_key(Path(path))
    newest = known_good.read()[0]
    yield from _compared({"port": newest.port, **newest.settings}, {"port": start.port, **start.settings})


def _start_embedded(start: KnownGood, steps: Steps) -> Server:
    python = environment.prepare(steps, Environment(start.stack)).python
    settings = start.settings
    path = str(settings.get("key_file") or "")
    plan = StartPlan(
        start.device,
        model=str(settings.get("model") or ""),
        profile=start.profile,
        stack=start.stack,
        port=start.port,
        host=_host(start),
        key_file=path,
        key=access.read_key(Path(path)) if path else "",
        hosts=tuple(settings.get("hosts") or ()),
        flags=tuple(settings.get("arguments") or ()),
        profiled=bool(settings.get("profiled")),
    )
    return embedded.up(plan, python, steps)


def _host(start: KnownGood) -> str:
    """Return the address on which a start listened."""
    if start.image:
        return docker_compose.service_of(start.project).host
    return str(start.settings.get("host") or LOOPBACK)


def _own_name(client: docker.DockerClient, image_id: str, start: KnownGood) -> str:
    """Return the own name of the image that Compose serves now, in words."""
    if not image_id:
        return "missing"
    with suppress(SparkforgeError):
        tag = versions.own_name(versions.version(inspect.manifest(client, client.images.get(image_id))), image_id)
        return f"{versions.split(_served_name(start))[0]}:{tag}"
    return image_id


def _cache(client: docker.DockerClient, start: KnownGood) -> str:
    """Say whether the image's folder of compiled code is in its volume, read through a container that never runs."""
    gone = "which has none of it: the start compiles what the image does not hold"
    try:
        client.volumes.get(start.volume or "-")
    except NotFound:
        return gone
    host = client.api.create_host_config(binds=[f"{start.volume}:{container.CACHE}:ro"])
    reader = client.api.create_container(start.image, command=["true"], entrypoint=["true"], host_config=host)["Id"]
    try:
        stream, _ = client.api.get_archive(reader, f"{container.CACHE}/{start.cache}")
        stream.close()
    except NotFound:
        return gone
    finally:
        client.api.remove_container(reader, v=True, force=True)
    return "which is there"


def _require_mounts(project: Mapping[str, Any]) -> None:
    """Raise ServerError for a file or folder of the host that the container had and that is gone."""
    mounts = project["services"][SERVICE].get("volumes") or []
    sources = [str(mount.get("source")) for mount in mounts if mount.get("type") == "bind"]
    sources += [secret["file"] for secret in (project.get("secrets") or {}).values() if "file" in secret]
    for source in sources:
        if not Path(source).exists():
            raise _impossible(f"{source} is gone", "the container had it mounted", LIST)


def _checkout(start: KnownGood) -> Iterator[str]:
    """Yield a line if the checkout is at another commit than at that start: its Compose files may be others."""
    now = known_good.revision()
    if start.revision and now and start.revision != now:
        yield (
            f"the checkout stays at {now[:12]}, then it was at {start.revision[:12]}: this start has its own Compose "
            "project, a later `docker compose up` has the checkout's"
        )


def _differences(current: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings in which two resolved projects differ, each in a line."""
    before, after = (dict(project["services"][SERVICE]) for project in (current, target))
    for key in ("image", "build", "depends_on"):
        before.pop(key, None), after.pop(key, None)
    yield from _compared(before, after)


def _compared(current: Mapping[str, Any], target: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted({*current, *target}):
        before, after = current.get(key), target.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _compared(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}: {before!r}, will be {after!r}"


def _impossible(failure: str, why: str, fix: str) -> ServerError:
    return ServerError(failure, f"{why}; nothing was changed", fix, code="server.rollback")
