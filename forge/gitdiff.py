"""Writing diffs and merging three ways, by git. Applying needs no git (docs/decisions/0002); who writes patches has it.

A second differ and merger of our own, for machines without git, would only give second results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from forge.tree import Content
from sparkforge.errors import CommandError
from sparkforge.process import run

# Apart from any configuration of the user or the machine, so that everybody's patches come out the same.
ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
PLAIN = ("--no-color", "--no-ext-diff", "--no-renames", "--abbrev=12")
INSTALL = "install git (apt-get install git), then run the same command again"


def git(directory: Path, *words: str | Path, ends: tuple[int, ...] = (0,)) -> int:
    """Run git in `directory` and return its exit code. Raises CommandError unless that is one of `ends`."""
    command: list[str | Path] = ["git", "-c", "core.autocrlf=false", *words]
    done = run(command, cwd=directory, env={**ENV, "GIT_CEILING_DIRECTORIES": str(directory.parent)}, check=False,
               fix=INSTALL)  # fmt: skip
    if done.returncode not in ends:
        why = (done.stderr or done.stdout).strip() or f"it ended with code {done.returncode}"
        raise CommandError(f"git {words[0]} failed in {directory}", why, INSTALL)
    return done.returncode


def diff(before: Mapping[str, Content], after: Mapping[str, Content]) -> bytes:
    """Return the diff from `before` to `after` (path → bytes, None: no such file) as our queues hold it."""
    with tempfile.TemporaryDirectory(prefix="sparkforge-") as name:
        scratch = Path(name).resolve()
        for side, files in (("a", before), ("b", after)):
            (scratch / side).mkdir()
            for path, content in files.items():
                if content is not None:
                    (scratch / side / path).parent.mkdir(parents=True, exist_ok=True)
                    (scratch / side / path).write_bytes(content)
        output = scratch / "diff"
        git(scratch, "diff", "--no-index", "--no-prefix", *PLAIN, f"--output={output}", "a", "b", ends=(0, 1))
        return output.read_bytes()


def merge(ours: bytes, base: bytes, theirs: bytes, labels: tuple[str, str, str]) -> tuple[bytes, int]:
    """Merge three ways; return the text and the number of conflicts, which stand in it between markers with `labels`.

    Raises CommandError for what is no text.
    """
    with tempfile.TemporaryDirectory(prefix="sparkforge-") as name:
        scratch = Path(name).resolve()
        for side, content in (("ours", ours), ("base", base), ("theirs", theirs)):
            (scratch / side).write_bytes(content)
        named = [word for label in labels for word in ("-L", label)]
        # merge-file ends with the number of conflicts, at most 127, and with 255 for an error (git-merge-file(1)).
        count = git(scratch, "merge-file", "--diff3", *named, "ours", "base", "theirs", ends=tuple(range(128)))
        return (scratch / "ours").read_bytes(), count
