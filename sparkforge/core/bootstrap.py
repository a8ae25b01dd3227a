"""Make `.venv` from `locks/tools.txt`: `python3 -m sparkforge.core.bootstrap ROOT`, which `./inv` runs.

It runs before anything is installed, so this module and its imports need only the standard library.

The copy of the lock in `.venv/.complete` is written last; without it the folder counts as incomplete and is made again.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from sparkforge.core import installers
from sparkforge.core.errors import ProcessError

MARK = ".made-by-sparkforge"


def main(root: Path) -> None:
    """Make or repair `root`/.venv while holding a lock, so that two first runs do not collide. Raises ProcessError."""
    venv, lock = root / ".venv", root / "locks" / "tools.txt"
    if find_spec("ensurepip") is None or find_spec("venv") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        why = "its venv and pip modules are not installed"
        fix = f"sudo apt install python{version}-venv   # then the same command again"
        raise ProcessError(f"Python {version} cannot make a virtual environment", why, fix, code="process.setup")
    if os.geteuid() == 0 and os.environ.get("SUDO_UID") and (owner := root.stat().st_uid):
        why = f"root would own it, and {root} belongs to uid {owner}, who could not update it"
        fix = f"{root}/inv --list, which makes it; then run the same command with sudo again"
        raise ProcessError(".venv is not made with sudo", why, fix, code="process.setup")
    state = root / ".sparkforge"
    try:
        state.mkdir(mode=0o700, exist_ok=True)
        with (state / "bootstrap.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_complete(venv, lock):
                make(venv, lock)
    except OSError as error:
        fix = f"ls -ld {root} && df {root}   # its owner, and the free disk space"
        raise ProcessError("cannot write into the checkout", str(error), fix, code="process.setup") from error


def is_complete(venv: Path, lock: Path) -> bool:
    """Tell whether `venv` was completely made from this lock."""
    stamp = venv / ".complete"
    return stamp.is_file() and stamp.read_bytes() == lock.read_bytes()


def make(venv: Path, lock: Path) -> None:
    """Make `venv` again and install the lock; a folder that we did not make is not touched."""
    if venv.exists():
        if not (venv / MARK).exists():
            fix = f"mv {venv} {venv}.old   # then the same command again"
            raise ProcessError(f"{venv} is in the way", "it was not made by ./inv", fix, code="process.setup")
        shutil.rmtree(venv)
    sys.stderr.write("First run: making .venv from locks/tools.txt …\n")
    venv.mkdir()
    (venv / MARK).touch()
    run([sys.executable, "-m", "venv", str(venv)], "cannot make .venv")
    python = str(venv / "bin" / "python")
    locked = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "-r"]
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    failure = "cannot install locks/tools.txt"
    uv = re.search(r"(?m)^uv==.*\\\n(?: +--hash=.*\n)+", lock.read_text(encoding="utf-8"))
    if uv:  # uv needs a third of pip's time, but supports only some of pip's settings
        (venv / "uv.txt").write_text(uv[0])
        run([*pip, *locked, str(venv / "uv.txt")], failure)
        command = [python, "-m", "uv", "pip", "install", "--python", python, "--compile-bytecode", *locked, str(lock)]
    if not uv or attempt(command, uv_variables(python)):
        run([*pip, *locked, str(lock)], failure)
    temporary = venv / ".complete.tmp"
    shutil.copyfile(lock, temporary)
    os.sync()  # everything else must be on the disk before .complete
    temporary.replace(venv / ".complete")


def uv_variables(python: str) -> dict[str, str]:
    """Return uv's settings, with the index and CA bundle of pip, whose configuration uv does not read."""
    files = installers.pip_files(python)
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL") or files.get("index-url", "")
    variables = {"UV_DEFAULT_INDEX": index, "SSL_CERT_FILE": os.environ.get("PIP_CERT") or files.get("cert", "")}
    settings = {"UV_NO_CONFIG": "1", "UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    return settings | {name: value for name, value in variables.items() if value}


def attempt(command: list[str], variables: Mapping[str, str] | None = None) -> str:
    """Run one step of the setup; return its output if it failed, otherwise an empty text."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # ./inv set it for us
    environment |= variables or {}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    return (result.stdout + result.stderr or f"exit code {result.returncode}") if result.returncode else ""


def run(command: list[str], failure: str) -> None:
    """Run one step of the setup, and repeat it if the index is busy. Raises ProcessError with the cause."""
    told = partial(print, file=sys.stderr)
    if refused := installers.insist(partial(attempt, command), told, "locks/tools.txt"):
        raise ProcessError(failure, refused.cause, refused.fix, code="process.setup")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ProcessError as error:
        sys.stderr.write(f"✗ {error.what} [{error.code}]\n  why:  {error.why}\n  next: {error.fix}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted; the next ./inv makes .venv again.\n")
        raise SystemExit(130) from None
