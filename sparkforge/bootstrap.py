"""Make `.venv` from `locks/tools.txt`. Runs before anything is installed: standard library only, started by `./inv`.

The copy of the lock in `.venv/.complete` is written last; without it the folder counts as half-made and is made anew.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

MARK = ".made-by-sparkforge"
EXIT_SETUP = 16  # sparkforge.errors.RuntimeSetupError, which cannot be imported from here
TAIL_LINES = 8


def fail(what: str, why: str, fix: str) -> NoReturn:
    """Print the three parts of an error and leave."""
    sys.stderr.write(f"✗ {what}\n  why:  {why}\n  next: {fix}\n")
    raise SystemExit(EXIT_SETUP)


def main(root: Path) -> None:
    """Make or repair `root`/.venv while holding a lock, so that two first runs do not meet."""
    venv, lock = root / ".venv", root / "locks" / "tools.txt"
    if find_spec("ensurepip") is None or find_spec("venv") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fail(
            f"Python {version} cannot make a virtual environment",
            "its venv and pip modules are not installed",
            f"sudo apt install python{version}-venv, then run the same command again",
        )
    state = root / ".sparkforge"
    try:
        state.mkdir(exist_ok=True)
        with (state / "bootstrap.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_complete(venv, lock):
                make(venv, lock)
    except OSError as error:
        fail("cannot write into the checkout", str(error), "check the folder's owner and the free disk space")


def is_complete(venv: Path, lock: Path) -> bool:
    """Tell whether `venv` was made to its end from this very lock."""
    stamp = venv / ".complete"
    return stamp.is_file() and stamp.read_bytes() == lock.read_bytes()


def make(venv: Path, lock: Path) -> None:
    """Make `venv` anew and install the lock; a folder that we did not make is not touched."""
    if venv.exists():
        if not (venv / MARK).exists():
            fail(
                f"{venv} is in the way",
                "it was not made by ./inv",
                f"mv {venv} {venv}.old, then run the same command again",
            )
        shutil.rmtree(venv)
    sys.stderr.write("First run: making .venv from locks/tools.txt …\n")
    venv.mkdir()
    (venv / MARK).touch()
    run([sys.executable, "-m", "venv", str(venv)], "cannot make .venv")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    run(
        [*pip, "--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", str(lock)],
        "cannot install locks/tools.txt",
    )
    temporary = venv / ".complete.tmp"
    shutil.copyfile(lock, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(venv / ".complete")


def run(command: list[str], what: str) -> None:
    """Run one step of the setup, quietly; show its last lines if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip() and "WARNING" not in line]
        why = "\n        ".join(lines[-TAIL_LINES:]) or f"{command[0]} ended with code {done.returncode}"
        fail(what, why, "check the network (or PIP_INDEX_URL, if you use a mirror), then run the same command again")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted; the next ./inv makes .venv anew.\n")
        raise SystemExit(130) from None
