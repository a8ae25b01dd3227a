"""`./inv image.publish` and `./inv image.pull`: an image goes to a registry and comes back by digest, never by tag.

The program docker pushes and pulls: it is on every machine that serves an image, has the logins (`docker login`), and
uses plain HTTP only for registries on the loopback address and in the engine's `insecure-registries` (Decision 0021).
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from docker.errors import APIError, ImageNotFound

from sparkforge.core import paths
from sparkforge.core.console import Steps, echo, say
from sparkforge.core.docker import docker as run_docker
from sparkforge.core.docker import docker_logged
from sparkforge.core.errors import EngineError, IntegrityError, SparkforgeError, UsageError
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine, inspect, trust, versions
from sparkforge.image.devices import build_command
from sparkforge.image.inspect import Expected

DENIED = {401, 403}  # HTTP: unauthorized, forbidden
REFERENCE = re.compile(r"(?P<repository>[a-z0-9][\w.:/-]*)@(?P<digest>sha256:[0-9a-f]{64})")
REPOSITORY = re.compile(r"[A-Za-z0-9.-]+(?::\d+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+")
EXAMPLE = "registry.example.com/sparkforge/vllm"


def publish(stack: str, name: str, repository: str, expected: Expected) -> None:
    """Push a stack's image, or the image `name`, and print its digest, which `pull` takes.

    The image must be this checkout's. Its tag in the registry is its own name, which no other image gets. Raises
    UsageError, EngineError, and IntegrityError for another checkout's image or a tag that another image has.
    """
    if not REPOSITORY.fullmatch(repository):
        why = "it takes a registry's host and a repository, without a tag"
        raise UsageError(f"{repository[:200]!r} is not a repository", why, f"./inv image.publish {EXAMPLE}")
    with engine.connected() as client:
        name = name or docker_compose.resolve(docker_compose.variables(stack)).image
        image = engine.image(client, name, build_command(stack))
        manifest, _ = inspect.require_ours(image, stack, expected)
        tag = versions.own_name(versions.version(manifest), image.id)
        reference = f"{repository}:{tag}"
        known = _digest(image, repository)
        try:
            present, denied = str(client.images.get_registry_data(reference).id), False
        except APIError as error:  # registries also deny access to a missing image; then the push succeeds
            if error.status_code not in {404, *DENIED}:
                raise
            present, denied = "", error.status_code in DENIED
        if present and present != known:
            why = f"it is {present}, which is not this image"
            fix = f"again   # first remove the tag {tag} from the registry"
            raise IntegrityError(f"{reference} is there already", why, fix, code="integrity.image")
        image.tag(repository, tag)
    with Steps(1).step("push", reference) as tell:
        try:
            docker_logged(["push", reference], paths.state() / "logs" / "publish.log", tell)
        except EngineError as error:
            if not denied:
                raise
            host = repository.partition("/")[0]
            login = f"docker login {host if set(host) & set('.:') else 'docker.io'}   # then the same command again"
            raise EngineError(f"the registry denies {repository}", error.why, login, code="engine.registry") from error
    with engine.connected() as client:
        image = client.images.get(image.id)
        if not (digest := _digest(image, repository)):
            why = f"the engine names no digest for {repository} after the push"
            raise EngineError("the image's digest is unknown", why, f"docker pull {reference}", code="engine.failed")
    echo(f"{repository}@{digest}")
    say(f"on another machine: ./inv image.pull {repository}@{digest}")


def pull(stack: str, reference: str, expected: Expected) -> None:
    """Pull the image REPOSITORY@sha256:DIGEST, check it against this checkout, and let Compose serve it.

    No tag of this machine changes before the image has passed; a refused image is removed. Raises UsageError
    without a digest, IntegrityError, EngineError.
    """
    if not REFERENCE.fullmatch(reference):
        why = "an image is pulled by digest, which identifies its content; a tag can be moved"
        failure = f"{reference[:200]!r} names no digest"
        raise UsageError(failure, why, "./inv image.pull --help   # the digest follows @sha256:")
    with engine.connected() as client:
        was_local = True
        try:
            client.images.get(reference)
        except ImageNotFound:
            was_local = False
    with Steps(1).step("pull", reference) as tell:
        docker_logged(["pull", reference], paths.state() / "logs" / "pull.log", tell)
    try:
        with engine.connected() as client:
            here = engine.read(client).platform
            image = engine.require_image(client, reference, here, build_command(stack))
            manifest, _ = inspect.require_ours(image, stack, expected)
            _require_stack(image, manifest, stack)
            evidence = trust.require(image, stack, reference.partition("@")[0])
            name = docker_compose.resolve(docker_compose.variables(stack)).image
            version = versions.move_tags(image, name)
            trust.accept(stack, evidence)
    except BaseException:
        if not was_local:
            with suppress(SparkforgeError):  # the refusal is the one to report
                run_docker(["image", "rm", reference])
        raise
    say(f"{name} is {version}; start it: ./inv up, go back: ./inv rollback")


def _require_stack(image: Any, manifest: Mapping[str, Any], stack: str) -> None:
    labels = inspect.labels(image.attrs)
    named = {"manifest": manifest.get("stack"), "label": labels.get(versions.STACK_LABEL)}
    if wrong := [f"its {origin} says {name!r}" for origin, name in named.items() if name != stack]:
        why = f"{', and '.join(wrong)}, and the stack {stack} was requested"
        raise IntegrityError(f"{image.short_id} is refused", why, build_command(stack), code="integrity.image")


def _digest(image: Any, repository: str) -> str:
    names = {repository, re.sub(r"^(?:index\.)?docker\.io/(?:library/)?", "", repository)}  # as the engine shortens it
    digests = [entry.partition("@") for entry in image.attrs.get("RepoDigests") or []]
    return next((digest for name, _, digest in digests if name in names), "")
