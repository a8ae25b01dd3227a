"""The target of a validation: the server's interpreter, its packages, the environment, the model, the port."""

import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from packaging.utils import canonicalize_name

from sparkforge.core.files import parse_json
from sparkforge.core.process import ProbeError, ask, require
from sparkforge.core.vllm_flags import flag_value

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")

DEFAULT_PORT = 8000  # vLLM 0.32.0's own default, vllm/entrypoints/launchers/cli_args.py
INTERPRETER_SECONDS = 3.0
ASK_INTERPRETER = (
    "import json,platform,sys;"
    "print(json.dumps([platform.python_version(), [p for p in sys.path if p], sys.flags.optimize]))"
)


def once(function: Callable[[*Arguments], T]) -> Callable[[*Arguments], T]:
    """Return the function with a cache for its result or exception, so that a probe that hung does not run again."""

    @functools.cache
    def outcome(*args: Any) -> tuple[T | None, Exception | None]:
        """Return an exception instead of raising it, because `functools.cache` does not cache raised exceptions."""
        try:
            return function(*args), None
        except Exception as error:  # noqa: BLE001 - raised again for every caller below
            return None, error

    @functools.wraps(function)
    def answer(*args: *Arguments) -> T:
        value, error = outcome(*args)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    return answer


@dataclass(frozen=True)
class Options:
    """The caller's options. Unset values are read from `serve_args`, then from vLLM's defaults.

    `stack` is the table of pins.toml with the expected versions; unset: the profile's. `foreign`: the user made the
    environment. `layers` adds the check of that name to a profile without it.
    """

    stack: str | None = None
    foreign: bool = False
    model: Path | None = None
    host: str | None = None
    port: int | None = None
    gpu_memory_utilization: float | None = None
    serve_args: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    deep: bool = True
    layers: bool = False
    deep_seconds: float = 240.0
    numerics_seconds: float = 180.0


@dataclass(frozen=True, eq=False)
class Target:
    """Options, and the packages of the server's interpreter. The interpreter is queried once."""

    options: Options
    stack: str

    def argument(self, flag: str) -> str | None:
        """Return the value of a flag in the arguments for the server; None if the flag is not set."""
        return flag_value(self.options.serve_args, flag)

    @once
    def interpreter(self) -> tuple[str, tuple[str, ...], int]:
        """Version, sys.path and -O level of the serving interpreter. Raises ProbeError if it does not answer."""
        if self.options.python.absolute() == Path(sys.executable).absolute():
            return platform.python_version(), tuple(sys.path), sys.flags.optimize
        name, env = str(self.options.python), self.options.environ
        answer = ask([self.options.python, "-c", ASK_INTERPRETER], seconds=INTERPRETER_SECONDS, env=env)
        version, path, optimize = parse_json(require(answer, name, INTERPRETER_SECONDS), name)
        return version, tuple(path), optimize

    @once
    def metadata(self) -> dict[str, Path]:
        """Return the metadata folders by normalised name; of two with one name, the first on the path."""
        folders: dict[str, Path] = {}
        for directory in dict.fromkeys(self.interpreter()[1]):
            with suppress(OSError):
                for entry in Path(directory).iterdir():
                    if entry.name.endswith((".dist-info", ".egg-info")):
                        folders.setdefault(canonicalize_name(entry.name.split("-")[0]), entry)
        return folders

    @once
    def distributions(self) -> dict[str, importlib.metadata.Distribution]:
        """Installed distributions by normalised name."""
        return {name: importlib.metadata.PathDistribution(folder) for name, folder in self.metadata().items()}

    def version(self, *names: str) -> str:
        """Version of the first of `names` that is installed; raises ProbeError if none is."""
        for name in names:
            if (distribution := self.distributions().get(name)) is not None:
                return distribution.version
        raise ProbeError(f"not installed: {' or '.join(names)}")

    @once
    def package_directory(self, name: str) -> Path:
        """Directory of an importable package, found without importing it; raises ProbeError if there is none."""
        for directory in self.interpreter()[1]:
            if (Path(directory) / name / "__init__.py").is_file():
                return Path(directory) / name
        raise ProbeError(f"no package {name} on the path of {self.options.python}")
