"""Names of images that last: the tag that an image's locks give it, which old images are kept, and which may go.

A stack's image has up to three tags in its repository: the moving one that Compose names (`spark`), the version, made
of vLLM's version and the hash of the locks and patch queues (`spark-0.32.0-1a2b3c4d5e6f`), and its own name, the
version with the image's id behind it. Version and moving tag go over to the next image; the own name stays, so that no
image is ever left without one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import ImageNotFound

from sparkforge.core.console import echo, say
from sparkforge.core.errors import SparkforgeError, UsageError
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine, inspect

KEEP_VARIABLE, KEEP = "SPARKFORGE_KEEP_IMAGES", 3  # old images of a stack that `image.clean` leaves
STACK_LABEL = "org.sparkforge.stack"
ID_DIGITS = 12


def version(manifest: Mapping[str, Any]) -> str:
    """Return the version tag that an image's manifest gives it: STACK-VLLM-HASH, the same for the same locks.

    HASH is 12 hexadecimal digits of the sha256 of what `image.verify` compares: the locked set and the patch queues.
    """
    inputs = {key: dict(manifest.get(key) or {}) for key in inspect.COMPARED}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:ID_DIGITS]
    release = str(dict(manifest.get("packages") or {}).get("vllm", "0")).partition("+")[0]
    return re.sub(r"[^\w.-]", "-", f"{manifest.get('stack') or 'unknown'}-{release}-{digest}")


def own_name(version_tag: str, image_id: str) -> str:
    """Return the tag that no other image ever gets: the version, and the first digits of the image's id."""
    return f"{version_tag}-{image_id.removeprefix('sha256:')[:ID_DIGITS]}"


def split(name: str) -> tuple[str, str]:
    """Return repository and tag of an image's name; a port of the registry is no tag."""
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")


def give_own_name(
    client: docker.DockerClient, image: Any, repository: str, manifest: Mapping[str, Any] | None = None
) -> str:
    """Give an image of ours its own name in `repository`, and return REPOSITORY:TAG.

    `manifest` is the image's, where it has been read. Raises IntegrityError or EngineError for an image without ours.
    """
    tag = own_name(version(manifest or inspect.manifest(client, image)), image.id)
    image.tag(repository, tag)
    return f"{repository}:{tag}"


def move_tags(client: docker.DockerClient, image: Any, name: str) -> str:
    """Give `image` the tag in `name`, which Compose serves, and its version; return the version's whole name.

    What had one of the tags before gets its own name first, and so does `image`.
    """
    repository, _ = split(name)
    manifest = inspect.manifest(client, image)
    tag = version(manifest)
    for moving in (name, f"{repository}:{tag}"):
        _keep(client, moving, repository)
    give_own_name(client, image, repository, manifest)
    for moving in (split(name)[1], tag):
        image.tag(repository, moving)
    return f"{repository}:{tag}"


@contextmanager
def named(stack: str) -> Iterator[None]:
    """Build a stack's image inside: what it replaces gets its own name before, and the new one its tags after."""
    name = docker_compose.resolve(docker_compose.variables(stack)).image
    with engine.connected() as client:
        _keep(client, name, split(name)[0])
    yield
    with engine.connected() as client:
        say(f"{name} is {move_tags(client, client.images.get(name), name)}")


def _keep(client: docker.DockerClient, name: str, repository: str) -> None:
    """Give what is called `name` its own name; an image that is none of ours keeps only what it has."""
    try:
        give_own_name(client, client.images.get(name), repository)
    except ImageNotFound:
        return
    except SparkforgeError as error:
        say(f"{name} gets no name of its own: {error.why}")


@dataclass(frozen=True)
class LocalImage:
    """An image of a stack on this machine: `size` in bytes with layers that it shares; `why` it is not removed."""

    id: str
    tags: tuple[str, ...]
    digests: tuple[str, ...]
    tagged: str
    size: int
    why: str


def local_images(client: docker.DockerClient, stack: str, name: str, known_good: Mapping[str, str]) -> list[LocalImage]:
    """Return a stack's images, the one tagged last first. `name` is what Compose serves; `known_good` is id → words.

    An image may not go if a container uses it, Compose would serve it, a start with it is a known good one, or somebody
    gave it a name of another kind.
    """
    users: dict[str, str] = {}
    for container in client.api.containers(all=True):
        users.setdefault(container["ImageID"], f"container {container['Id'][:12]} uses it")
    images = []
    for image in client.images.list(filters={"label": f"{STACK_LABEL}={stack}"}):
        tags = tuple(sorted(image.tags))
        foreign = [tag for tag in tags if not split(tag)[1].startswith(f"{stack}-") and tag != name]
        why = users.get(image.id) or known_good.get(image.id, "")
        why = why or ("Compose serves it" if name in tags else "") or (f"you named it {foreign[0]}" if foreign else "")
        last = str((image.attrs.get("Metadata") or {}).get("LastTagTime") or "")
        created = str(image.attrs.get("Created") or "")
        digests = tuple(image.attrs.get("RepoDigests") or ())
        images.append(LocalImage(image.id, tags, digests, max(last, created), int(image.attrs.get("Size", 0)), why))
    return sorted(images, key=lambda image: image.tagged, reverse=True)


def kept_number(text: str) -> int:
    """Return how many old images are kept: `text`, else the setting, else KEEP. Raises UsageError for no number."""
    text = text or os.environ.get(KEEP_VARIABLE, "") or str(KEEP)
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        why = f"it is the number of old images that stay ({KEEP_VARIABLE}, default {KEEP})"
        raise UsageError(f"--keep {text[:40]!r} is no number", why, "./inv image.clean --keep 3")
    return int(text)


def to_remove(images: Sequence[LocalImage], keep: int) -> list[LocalImage]:
    """Return the images that may go: of those that nothing holds, all but the `keep` that were tagged last."""
    return [image for image in images if not image.why][keep:]


def clean(stack: str, keep: int, known_good: Mapping[str, str], *, dry_run: bool) -> None:
    """Remove a stack's old images but the `keep` newest, and list the others; with `dry_run` remove none, list all."""
    name = docker_compose.resolve(docker_compose.variables(stack)).image
    with engine.connected() as client:
        images = local_images(client, stack, name, known_good)
        chosen = to_remove(images, keep)
        for image in chosen:
            say(f"{'would remove' if dry_run else 'remove'} {max(image.tags, key=len, default=image.id)}")
            if not dry_run:
                for reference in (*image.tags, *image.digests) or (image.id,):
                    with suppress(ImageNotFound):  # a digest goes with the last tag of its repository
                        client.images.remove(reference)
    listed = [image for image in images if dry_run or image not in chosen]
    for image in listed:
        tag, note = max(image.tags, key=len, default="no name"), f" · {image.why}" if image.why else ""
        echo(f"{image.id.removeprefix('sha256:')[:ID_DIGITS]}  {image.size / 1e9:6.2f} GB  {tag}{note}")
    total = sum(image.size for image in listed) / 1e9
    say(f"{len(listed)} images, {total:.2f} GB; layers that images share are counted in each of them")
    if not chosen:
        say(f"nothing to remove: of the images that nothing holds, the {keep} newest stay")
