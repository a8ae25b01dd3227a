"""What is being validated: the interpreter that will serve, its packages, the environment, the model, the port."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from validate.bounded import ProbeError, ask, require

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")

DEFAULT_PORT = 8000  # vLLM's own default, vllm/entrypoints/openai/cli_args.py
DEFAULT_UTILIZATION = 0.92  # vLLM 0.32.0's own default, vllm/config/cache.py:102
INTERPRETER_SECONDS = 3.0
ASK_INTERPRETER = (
    "import json,platform,sys;"
    "print(json.dumps([platform.python_version(), [p for p in sys.path if p], sys.flags.optimize]))"
)


def once(function: Callable[[*Arguments], T]) -> Callable[[*Arguments], T]:
    """Cache a function's answer for ever, its exception too: a probe that hung once is not asked again."""

    @functools.cache
    def kept(*args: Any) -> tuple[T | None, Exception | None]:
        """`functools.cache` forgets what raised, so an exception is returned."""
        try:
            return function(*args), None
        except Exception as error:  # noqa: BLE001 - raised again for every caller below
            return None, error

    @functools.wraps(function)
    def answer(*args: *Arguments) -> T:
        """Return what was answered the first time, or raise what was raised."""
        value, error = kept(*args)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    return answer


@dataclass(frozen=True)
class Options:
    """What the caller wants validated. Unset values are read from `serve_args`, then from vLLM's defaults."""

    model: Path | None = None
    host: str | None = None
    port: int | None = None
    gpu_memory_utilization: float | None = None
    serve_args: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    deep: bool = True
    deep_seconds: float = 240.0
    numerics_seconds: float = 180.0


@dataclass(frozen=True, eq=False)
class Scene:
    """Options with lazy, cached looks at the interpreter that will serve."""

    options: Options
    stack: str

    def argument(self, flag: str) -> str | None:
        """Value of a flag among the arguments for the server, as `argument` finds it."""
        return argument(self.options.serve_args, flag)

    @once
    def interpreter(self) -> tuple[str, tuple[str, ...], int]:
        """Version, sys.path and -O level of the interpreter that will serve. Raises ProbeError if it does not tell."""
        if self.options.python.absolute() == Path(sys.executable).absolute():
            return platform.python_version(), tuple(sys.path), sys.flags.optimize
        told = ask([self.options.python, "-c", ASK_INTERPRETER], seconds=INTERPRETER_SECONDS, env=self.options.environ)
        version, path, optimize = json.loads(require(told, str(self.options.python), INTERPRETER_SECONDS))
        return version, tuple(path), optimize

    @once
    def distributions(self) -> dict[str, importlib.metadata.Distribution]:
        """Installed distributions by normalised name; where a name occurs twice, the first on the path wins."""
        found: dict[str, importlib.metadata.Distribution] = {}
        for directory in dict.fromkeys(self.interpreter()[1]):
            for entry in _metadata_directories(Path(directory)):
                name = re.sub(r"[-_.]+", "-", entry.name.split("-")[0]).lower()
                found.setdefault(name, importlib.metadata.PathDistribution(entry))
        return found

    def version(self, *names: str) -> str:
        """Version of the first of `names` that is installed; raises ProbeError if none is."""
        for name in names:
            if (found := self.distributions().get(name)) is not None:
                return found.version
        raise ProbeError(f"not installed: {' or '.join(names)}")

    @once
    def package_directory(self, name: str) -> Path:
        """Directory of an importable package, found without importing it; raises ProbeError if there is none."""
        for directory in self.interpreter()[1]:
            if (Path(directory) / name / "__init__.py").is_file():
                return Path(directory) / name
        raise ProbeError(f"no package {name} on the path of {self.options.python}")


def argument(words: Sequence[str], flag: str) -> str | None:
    """Value of `--flag VALUE` or `--flag=VALUE` in a server's arguments; the last one wins, None if there is none."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else (words[index + 1] if index + 1 < len(words) else None)
    return found


def _metadata_directories(directory: Path) -> list[Path]:
    try:
        return [entry for entry in directory.iterdir() if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []
