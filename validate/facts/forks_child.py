"""`python -P forks_child.py PLAN`: runs programs in the server's interpreter, each in a fork of this process.

PLAN is a file with a JSON list; each item has `program`, its `request`, its time limit in `seconds`, the modules that
it `imports`, and `files`: a path that gets the suffixes .answers, .output and .end. The modules are imported once. The
file .end has a JSON line: the exit code (null after the time limit) and the seconds. This program needs only the
standard library.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

STEP_SECONDS, REAP_SECONDS = 0.02, 2.0


def become(item: dict[str, Any]) -> None:
    """Run the program of `item` in this process, as `python -P PROGRAM REQUEST ANSWERS` would, and end it."""
    code = 1
    try:
        os.setsid()
        with Path(item["files"] + ".output").open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        arguments = [item["program"], item["request"], item["files"] + ".answers"]
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():  # by an import; a fork could not use the GPU
            os.execv(sys.executable, [sys.executable, "-P", *arguments])  # noqa: S606
        sys.argv = arguments
        runpy.run_path(item["program"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - prints every exception, as an interpreter does
        traceback.print_exc()
    finally:  # the fork must not return into the parent's code, not even when the disk is full
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(item: dict[str, Any]) -> int | None:
    """Return the exit code of the program of `item`, as subprocess does; None if it reached its time limit."""
    child = os.fork()
    if not child:
        become(item)
    deadline = time.monotonic() + item["seconds"]
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(STEP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    deadline = time.monotonic() + REAP_SECONDS  # a process that is stuck in a driver stays
    while time.monotonic() < deadline and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(STEP_SECONDS)
    return None


def main(plan: str) -> None:
    """Import the programs' modules and run the programs in turn."""
    items = json.loads(Path(plan).read_text())
    for name in dict.fromkeys(name for item in items for name in item["imports"]):
        with suppress(Exception):  # the program that needs it reports the error
            importlib.import_module(name)
    for item in items:
        start = time.monotonic()
        end = {"code": run(item), "seconds": time.monotonic() - start}
        Path(item["files"] + ".end").write_text(json.dumps(end) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
