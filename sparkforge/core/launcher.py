"""The command `sparkforge` of an installed wheel: it unpacks the files in the wheel, and runs the command line there.

The files become a checkout in the user's data folder, once per wheel, so that environments, Docker and systemd find a
permanent folder even if `uvx` installed the wheel for a single run. The user's files in it stay. This module and its
imports need only the standard library, because the wheel installs nothing else.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.errors import StorageError, on

CARRIED = Path(__file__).parents[1] / "checkout"  # setup.py writes this folder; a checkout has none


def main() -> None:
    """Run the command line; an editable installation runs `./inv`. Does not return."""
    arguments = sys.argv[1:]
    if not CARRIED.is_dir():
        os.execv(paths.ROOT / "inv", ["./inv", *arguments])  # noqa: S606 - no shell is wanted
    root = paths.user_folder("data")
    try:
        os.environ["INV_CWD"] = str(Path.cwd())  # relative paths on the command line start in that folder
        # Child processes find the complete packages there before the few modules of the wheel.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        lay_out(CARRIED, root)
        os.chdir(root)
    except OSError as error:
        fix = on("ls -ld", root, f"its owner, and the free disk space; {paths.USER_FOLDERS['data'][0]} moves it")
        refused = StorageError("cannot lay out Sparkforge's files", str(error), fix, code="storage.access")
        sys.stderr.write(f"✗ {refused.what} [{refused.code}]\n  why:  {refused.why}\n  next: {refused.fix}\n")
        raise SystemExit(refused.exit_code) from None
    os.execv(sys.executable, [sys.executable, "-m", "sparkforge.cli", *arguments])  # noqa: S606 - as above


def lay_out(carried: Path, root: Path) -> None:
    """Update the files in `root` to those of the wheel; their list is replaced last, so a killed run is repeated."""
    files = (carried / paths.WHEEL_LIST).read_text(encoding="utf-8")
    mark = root / paths.WHEEL_LIST
    before = mark.read_text(encoding="utf-8") if mark.is_file() else ""
    if before == files:
        return
    names, old = ([line.split(" ", 1)[1] for line in text.splitlines()] for text in (files, before))
    for name in (*names, paths.WHEEL_LIST):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
        if name == paths.WHEEL_LIST:
            for gone in set(old) - set(names):
                (root / gone).unlink(missing_ok=True)
            os.sync()
        shutil.copy2(carried / name, temporary)
        temporary.replace(target)
