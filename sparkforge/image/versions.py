"""Lasting names of images: a tag from the image's locks, and a unique name.

A stack's image has up to three tags in its repository: the moving tag that Compose uses (`spark`); the version, made
of vLLM's version and the hash of the locks and patch queues (`spark-0.32.0-1a2b3c4d5e6f`); and its own name, the
version followed by the image's id. Version and moving tag move to the next image; the own name stays, so that every
image keeps a name.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import docker
from docker.errors import ImageNotFound

from sparkforge.core.console import say
from sparkforge.core.errors import SparkforgeError
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine, inspect

STACK_LABEL = "org.sparkforge.stack"
ID_DIGITS = 12


def version(manifest: Mapping[str, Any]) -> str:
    """Return the version tag for an image's manifest: STACK-VLLM-HASH, the same for the same locks.

    HASH is 12 hexadecimal digits of the sha256 of the locked set and the patch queues, as `image.verify` compares them.
    """
    inputs = {key: dict(manifest.get(key) or {}) for key in inspect.COMPARED}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:ID_DIGITS]
    release = str(dict(manifest.get("packages") or {}).get("vllm", "0")).partition("+")[0]
    return re.sub(r"[^\w.-]", "-", f"{manifest.get('stack') or 'unknown'}-{release}-{digest}")


def own_name(version_tag: str, image_id: str) -> str:
    """Return the tag that no other image ever gets: the version, and the first digits of the image's id."""
    return f"{version_tag}-{image_id.removeprefix('sha256:')[:ID_DIGITS]}"


def split(name: str) -> tuple[str, str]:
    """Return repository and tag of an image's name; the registry may have a port."""
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")


def give_own_name(image: Any, repository: str, manifest: Mapping[str, Any] | None = None) -> str:
    """Give an image of ours its own name in `repository`, and return REPOSITORY:TAG.

    `manifest` is the image's, if the caller has read it. Raises IntegrityError or EngineError for a foreign image.
    """
    tag = own_name(version(manifest or inspect.manifest(image)), image.id)
    image.tag(repository, tag)
    return f"{repository}:{tag}"


def move_tags(image: Any, name: str) -> str:
    """Give `image` the tag in `name`, which Compose serves, and its version; return the version's whole name.

    The images that had these tags get their own names first, and so does `image`.
    """
    repository, _ = split(name)
    manifest = inspect.manifest(image)
    tag = version(manifest)
    for moving in (name, f"{repository}:{tag}"):
        _keep(image.client, moving, repository)
    give_own_name(image, repository, manifest)
    for moving in (split(name)[1], tag):
        image.tag(repository, moving)
    return f"{repository}:{tag}"


@contextmanager
def named(stack: str) -> Iterator[None]:
    """Context of an image's build: first the old image gets its own name, in the end the new one gets its tags."""
    name = docker_compose.resolve(docker_compose.variables(stack)).image
    with engine.connected() as client:
        _keep(client, name, split(name)[0])
    yield
    with engine.connected() as client:
        say(f"{name} is {move_tags(client.images.get(name), name)}")


def _keep(client: docker.DockerClient, name: str, repository: str) -> None:
    try:
        give_own_name(client.images.get(name), repository)
    except ImageNotFound:
        return
    except SparkforgeError as error:
        say(f"{name} gets no lasting name: {error.why}")
