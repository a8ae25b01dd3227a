"""Runs the `docker` command of this machine, and explains the errors of docker and of the engine."""

import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparkforge.core import paths, tables
from sparkforge.core.errors import EngineError, SparkforgeError, StorageError, on
from sparkforge.core.process import TAIL_LINES, Child, run_unchecked
from sparkforge.core.tables import Record

INSTALL = "sudo apt install docker.io   # or Docker Engine: https://docs.docker.com/engine/install"
POLL_SECONDS = 0.2
LOG_END = 8192  # characters of a build's log that show how it ended; programs may print anything before
_REGISTRY = re.compile(r"https?://([^/\s\"]+)/v2/")  # the registry in a message; replaces HOST in a fix
# BuildKit's plain progress: "#12 [runtime 3/5] RUN …", and the output of a step: "#12 4.21 text".
_BUILD_STEP = re.compile(r"^#\d+ (\[[^\]]+\] .{0,60})", re.MULTILINE)
TABLE = Path(__file__).with_name("complaints.toml")
NO_SPACE = re.compile(r"^.*(?:no space left on device|disk quota exceeded).*$", re.IGNORECASE | re.MULTILINE)
PRUNE = "docker system df && docker builder prune   # remove the build cache first"


class Complaint(Record):
    """A message: the pattern of its line, and the error's code, first part and next command."""

    pattern: str
    code: str
    problem: str
    next: str


class Complaints(Record):
    """The whole of complaints.toml."""

    complaints: tuple[Complaint, ...]


def explained(text: str, failure: str, fix: str) -> SparkforgeError:
    """Return the error for docker's output `text`: a known one, else an EngineError with its last lines."""
    if match := NO_SPACE.search(text):
        return StorageError("the Docker engine has no space left", match[0].strip()[:500], PRUNE, code="storage.full")
    for row in tables.load(TABLE, Complaints).complaints:
        if match := re.search(f"(?im)^.*(?:{row.pattern}).*$", text):
            host = _REGISTRY.search(match[0])
            families = {family.family: family for family in SparkforgeError.__subclasses__()}
            fix = row.next.replace("HOST", host[1]) if host else row.next
            return families[row.code.partition(".")[0]](row.problem, match[0].strip()[:500], fix, code=row.code)
    tail = "\n        ".join(line for line in text.strip().splitlines()[-TAIL_LINES:] if line.strip())
    return EngineError(failure, tail or "it printed nothing", fix, code="engine.failed")


def docker(arguments: Sequence[str | Path], *, env: Mapping[str, str] | None = None, fix: str = "") -> str:
    """Run `docker` in the checkout with `arguments` to its end and return its stdout.

    `env` is added to ours. Raises EngineError without a docker command, and after a failure as `explained`.
    """
    result = run_unchecked([program(), *arguments], cwd=paths.ROOT, env=env)
    if result.returncode:
        fix = fix or f"{shlex.join(['docker', *map(str, arguments)])}   # by hand"
        raise explained(
            result.stdout + result.stderr, f"docker {arguments[0]} ended with code {result.returncode}", fix
        )
    return result.stdout


def docker_logged(
    arguments: Sequence[str | Path], log: Path, update: Callable[[str], None], env: Mapping[str, str] | None = None
) -> None:
    """Run a long `docker` command with its output in `log`; `update` gets the current build step. Raises as `docker`.

    An exception here, such as Ctrl-C, ends the command. For an unknown failure the fix is to read the log.
    """
    child = Child([program(), *arguments], log=log, env=env or {}, cwd=paths.ROOT)
    try:
        while (usage := child.poll()) is None:
            if steps := _BUILD_STEP.findall(log.read_text(encoding="utf-8", errors="replace")[-LOG_END:]):
                update(steps[-1])
            time.sleep(POLL_SECONDS)
    except BaseException:
        child.end()
        raise
    if usage.code:
        text = log.read_text(encoding="utf-8", errors="replace")[-LOG_END:]
        raise explained(text, f"docker {arguments[0]} ended with code {usage.code}", on("less", log))


def program() -> str:
    """Return the path of the `docker` command. Raises EngineError."""
    if path := shutil.which("docker"):
        return path
    raise EngineError("there is no docker command", "PATH holds none", INSTALL, code="engine.missing")


def require_plugin(name: str) -> str:
    """Return the version of `docker NAME` (buildx or compose). Raises EngineError if it is missing."""
    return docker([name, "version"]).strip().splitlines()[0]
