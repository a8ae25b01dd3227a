"""Git repositories for writing and rebasing patches, and the diffs that become patches."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lab.patches.checkout import SETTINGS
from sparkforge.core.git import git

DIFF = (
    "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--abbrev=12", "--unified=3",
    "--inter-hunk-context=0", "--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/", "-O/dev/null",
)  # fmt: skip
EXECUTABLE = re.compile(rb"^(index [0-9a-f]+\.\.[0-9a-f]+) 100755$", re.MULTILINE)  # our patches contain no modes


def make_repository(tree: Path, files: Mapping[str, bytes | None], message: str) -> None:
    """Make `tree` a repository, write `files` into it, and commit all of it."""
    tree.mkdir(parents=True, exist_ok=True)
    git(tree, "init", "--quiet", "--template=", "--initial-branch=upstream")
    for setting in (*SETTINGS, "core.autocrlf=false", "merge.conflictStyle=diff3"):  # for a maintainer's git
        git(tree, "config", *setting.split("=", 1))
    (tree / ".git/info").mkdir()
    (tree / ".git/info/exclude").write_text("__pycache__/\n*.pyc\n", encoding="utf-8")
    commit_files(tree, files, message)


def commit_files(tree: Path, files: Mapping[str, bytes | None], message: str) -> None:
    """Write `files` (None: remove the file) into `tree` and commit everything."""
    for path, content in files.items():
        if content is None:
            (tree / path).unlink(missing_ok=True)
        else:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(content)
    git(tree, "add", "--all", "--force")
    git(tree, "commit", "--quiet", "--allow-empty", f"--message={message}", settings=SETTINGS)


def diff(tree: Path, *revisions: str) -> bytes:
    """Return the diff between two revisions, or a revision and the work tree, in the format of our patch queues."""
    with tempfile.TemporaryDirectory(prefix="sparkforge-") as scratch:
        output = Path(scratch).resolve() / "diff"
        git(tree, *DIFF, f"--output={output}", *revisions, "--")
        return EXECUTABLE.sub(rb"\1", output.read_bytes())
