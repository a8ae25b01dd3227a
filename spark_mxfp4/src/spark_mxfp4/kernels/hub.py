"""Kernels from a local folder or a hub repository, through the optional package `kernels` (its version 0.17).

A name is `FOLDER#attribute` or `OWNER/NAME@VERSION#attribute`; the default attribute is `moe`. A folder begins with
`/`, `./`, `../` or `~`. VERSION is the repository's version number, or a branch, tag or commit.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TRUST_VARIABLE = "SPARK_MXFP4_TRUST_REMOTE_CODE"
DEFAULT_ATTRIBUTE = "moe"
# transformers 5.19 asks for the same range (transformers/utils/import_utils.py: KERNELS_MIN_VERSION).
INSTALL = "pip install 'kernels>=0.17,<0.18'"


class KernelSource(NamedTuple):
    """Where a kernel is: a folder or a repository's name, the version ("" for a folder), and the module's attribute."""

    location: str
    version: str
    attribute: str

    @property
    def is_folder(self) -> bool:
        """Whether this is a folder of this machine."""
        return self.location.startswith(("/", "./", "../", "~"))


def parse(name: str) -> KernelSource:
    """Split a kernel's name into its parts. Raises ValueError for a repository without a version, or an empty part."""
    location, _, attribute = name.partition("#")
    folder = KernelSource(location, "", attribute or DEFAULT_ATTRIBUTE)
    if folder.is_folder:
        return folder
    repository, _, version = location.partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(f"kernel {name!r} cannot be found · {location!r} is no repository · write OWNER/NAME@VERSION")
    if not version:
        raise ValueError(
            f"kernel {name!r} cannot be loaded · a repository's newest code changes by itself · "
            f"name a version: {repository}@1"
        )
    return KernelSource(repository, version, attribute or DEFAULT_ATTRIBUTE)


def find(name: str) -> Any:
    """Return the class or function called `name`, in the module's notation. Raises ValueError as `module` does."""
    source = parse(name)
    try:
        return getattr(module(name), source.attribute)
    except AttributeError as error:
        raise ValueError(
            f"kernel {name!r} cannot be loaded · {error} · name a class or function of it after '#'"
        ) from error


def module(name: str) -> ModuleType:
    """Return the module of the kernel `name`; download it if necessary.

    Code of organisations that the hub does not trust is refused unless SPARK_MXFP4_TRUST_REMOTE_CODE is 1. Raises
    ValueError if the package `kernels` is not installed, or the kernel does not exist or does not support this machine.
    """
    source = parse(name)
    try:
        import kernels  # noqa: PLC0415 (optional: most users need only the kernels of this library)
    except ImportError as error:
        raise ValueError(f"kernel {name!r} cannot be loaded · the package 'kernels' is missing · {INSTALL}") from error
    try:
        if source.is_folder:
            return kernels.get_local_kernel(Path(source.location).expanduser().resolve())
        trusted = os.environ.get(TRUST_VARIABLE) == "1"
        number = source.version.isdecimal()
        version = {"version": int(source.version)} if number else {"revision": source.version}
        return kernels.get_kernel(source.location, trust_remote_code=trusted, **version)
    # The hub, the file system and the kernel's own code may raise anything; every exception means "not loaded".
    except Exception as error:
        if source.is_folder:
            fix = f"check that {source.location} has a build for this torch (torch-cpu/ or torch-cuda/, metadata.json)"
        else:
            fix = f"check name, version and network; for code of your own choice set {TRUST_VARIABLE}=1"
        raise ValueError(f"kernel {name!r} cannot be loaded · {first_line(error)} · {fix}") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty, else the error's class."""
    return next((line.strip(" \t:") for line in str(error).splitlines() if line.strip()), type(error).__name__)
