"""Kernels from a local folder or a hub repository, through the optional package `kernels` (its version 0.17).

A name is `FOLDER#function` or `OWNER/NAME@VERSION#function`; without `#function` the function is called `moe`. A folder
begins with `/`, `./`, `../` or `~`. VERSION is the repository's version number, or a branch, tag or commit.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TRUST_VARIABLE = "SPARK_MXFP4_TRUST_REMOTE_CODE"
DEFAULT_FUNCTION = "moe"
# transformers 5.19 asks for the same range (transformers/utils/import_utils.py: KERNELS_MIN_VERSION).
INSTALL = "pip install 'kernels>=0.17,<0.18'"


class Source(NamedTuple):
    """Where a kernel is: a folder or a repository's name, the version ("" for a folder), and the function's name."""

    place: str
    version: str
    function: str

    @property
    def is_folder(self) -> bool:
        """Tell whether this is a folder of this machine."""
        return self.place.startswith(("/", "./", "../", "~"))


def parse(name: str) -> Source:
    """Take a kernel's name apart; raises ValueError for a repository without a version, or an empty part."""
    place, _, function = name.partition("#")
    if place.startswith(("/", "./", "../", "~")):
        return Source(place, "", function or DEFAULT_FUNCTION)
    repository, _, version = place.partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(f"kernel {name!r} cannot be found · {place!r} is no repository · write OWNER/NAME@VERSION")
    if not version:
        raise ValueError(
            f"kernel {name!r} cannot be loaded · a repository's newest code changes by itself · "
            f"name a version: {repository}@1"
        )
    return Source(repository, version, function or DEFAULT_FUNCTION)


def find(name: str) -> Any:
    """Load what `name` (see above) names: a function of a kernel's module, downloaded if need be.

    Code of organisations that the hub does not trust is refused unless SPARK_MXFP4_TRUST_REMOTE_CODE is 1. Raises
    ValueError if the package `kernels` is not installed, or the kernel is not there or not for this machine.
    """
    source = parse(name)
    try:
        import kernels  # noqa: PLC0415 (optional: most users have their kernels with this library)
    except ImportError as error:
        raise ValueError(f"kernel {name!r} cannot be loaded · the package 'kernels' is missing · {INSTALL}") from error
    try:
        return getattr(_module(kernels, source), source.function)
    # The loader raises what the hub, the file system or the kernel's own code raised; all of them mean "not loaded".
    except Exception as error:
        raise ValueError(f"kernel {name!r} cannot be loaded · {_first_line(error)} · {_next_step(source)}") from error


def _module(kernels: Any, source: Source) -> ModuleType:
    if source.is_folder:
        local: ModuleType = kernels.get_local_kernel(Path(source.place).expanduser().resolve())
        return local
    version: dict[str, Any] = (
        {"version": int(source.version)} if source.version.isdecimal() else {"revision": source.version}
    )
    remote: ModuleType = kernels.get_kernel(
        source.place, trust_remote_code=os.environ.get(TRUST_VARIABLE) == "1", **version
    )
    return remote


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip(" :")


def _next_step(source: Source) -> str:
    if source.is_folder:
        return f"check that {source.place} has a build for this torch (torch-cpu/ or torch-cuda/) with metadata.json"
    return f"check name, version and network; for code of your own choice set {TRUST_VARIABLE}=1"
