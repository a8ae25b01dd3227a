"""Small patch queues and trees for the tests of forge's patching; their diffs are made by git, the second opinion."""

import os
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

HEADER = """\
Description: Change something
 on two lines
Origin: vendor, Sparkforge
Bug: https://example.org/1
Forwarded: no
Last-Update: 2026-11-21
Drop-when: contains pkg/a.py nothing of the kind
---
"""


def write(directory, files):
    """Write {path: text, bytes, or None for no file} under `directory`, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        if content is not None:
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return directory


def snapshot(directory):
    """Return {path: bytes} of every file under `directory`; an empty directory is None."""
    entries = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            entries[str(path.relative_to(directory))] = path.read_bytes()
        elif not any(path.iterdir()):
            entries[str(path.relative_to(directory))] = None
    return entries


def git(directory, *words, stdin=b""):
    """Run git in `directory`, apart from any repository or configuration around it."""
    env = {"GIT_CEILING_DIRECTORIES": str(directory.parent), "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        ["git", "-c", "core.autocrlf=false", *words],  # noqa: S607
        cwd=directory,
        input=stdin,
        capture_output=True,
        check=False,
        env=env | {"GIT_CONFIG_NOSYSTEM": "1"},
    )


def diff(scratch, before, after):
    """Return git's diff, as bytes, between two {path: content}."""
    write(scratch / "a", before)
    write(scratch / "b", after)
    return git(scratch, "diff", "--no-index", "--no-renames", "--no-prefix", "--text", "a", "b").stdout


def write_queue(directory, *diffs, header=HEADER):
    """Write a queue whose patches hold `diffs` (text or bytes), and return its directory."""
    directory.mkdir(parents=True)
    for number, body in enumerate(diffs, 1):
        text = header.encode() + (body if isinstance(body, bytes) else body.encode())
        (directory / f"{number:04}-change-something.patch").write_bytes(text)
    names = sorted(path.name for path in directory.glob("*.patch"))
    (directory / "series").write_text("# a comment\n\n" + "".join(f"{name}\n" for name in names))
    return directory


OPERATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR


def killed_before(number, action):
    """Run `action` in a forked process that is killed by SIGKILL before its operation `number` (from 0).

    Returns False if it came to its end before that. No `finally` of ours runs in a killed process, so what it leaves in
    the folder for temporary files is removed here.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _killed_before(number, action, scratch)


def _killed_before(number, action, scratch):
    child = os.fork()
    if child == 0:
        tempfile.tempdir = scratch
        left = number

        def hook(event, args):
            nonlocal left
            if event in OPERATIONS or (event == "open" and args[2] & WRITING):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(hook)
        try:
            action()
        except BaseException:  # noqa: BLE001
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.fixture(scope="session")
def kit():
    """The helpers above, for tests that cannot import one another."""
    return SimpleNamespace(
        HEADER=HEADER,
        write=write,
        snapshot=snapshot,
        git=git,
        diff=diff,
        write_queue=write_queue,
        killed_before=killed_before,
    )
