"""A damaged file that a command reads gives a result or an error in three parts, never a traceback or a hang."""

import contextlib
import os
import shutil

import pytest
from invoke.context import Context
from invoke.exceptions import Exit

import tasks
from sparkforge.core import paths

pytestmark = pytest.mark.timeout(60)  # for one test; most take milliseconds
CONTEXT = Context()  # made before the user changes, because it reads a file in the home folder
LINE = 10_000_000
NUMBERS = ("1e999", "-1", str(2**70), "NaN", "9" * 5000)
CONTENTS = {
    "empty": b"",
    "bytes": b"\xff\xfe\xff",
    "NUL": b"a\0b",
    "deep JSON": b"[" * 100_000,
    "deep table": b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "deep TOML": b"a = " + b"[" * 3000 + b"]" * 3000,
    "10 MB of one line": b"a" * LINE,
    "a list": b"[1]",
    "a surrogate": b'{"schema": 1, "model_type": "\\ud800", "facts": {"\\ud800": 1}}',
    **{f"number {text[:20]}": b'{"pid": %b, "port": %b, "schema": %b}' % ((text.encode(),) * 3) for text in NUMBERS},
}
# Command → its call with the path of the damaged file.
COMMANDS = {
    "plan": lambda path: ("plan", {"model": str(path)}),
    "audit.so": lambda path: ("audit", {"paths": str(path)}),
    "audit.cubin": lambda path: ("audit", {"paths": str(path)}),
    "audit.whl": lambda path: ("audit", {"paths": str(path)}),
    "bench.compare.json": lambda path: ("bench.compare", {"before": str(path), "after": str(path)}),
    "bench.submit.json": lambda path: ("bench.submit", {"team": "a", "result": str(path)}),
    "doctor.log": lambda path: ("doctor", {"log": str(path)}),
}
STATE = {
    "server.json": ("status", "down", "logs"),
    "validation.json": ("doctor",),
    "server.end.json": ("doctor", "status"),
    "failure.json": ("doctor",),
    "up.json": ("doctor",),
    "build/audit-x.json": ("doctor",),
    "x.manifest.json": ("doctor",),
}
FILES = ("a folder", "a pipe", "no permission", "nothing", "a broken link", "itself")
KINDS = (*CONTENTS, *FILES)
BINARY_KINDS = ("bytes", "10 MB of one line", "a pipe", "no permission", "itself")  # fewer: each audit is slow


def damage(path, kind):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a broken link":
        path.symlink_to("nowhere")
    elif kind == "itself":
        path.symlink_to(path)
    elif kind != "nothing":
        path.write_bytes(CONTENTS.get(kind, b"{}"))
    if kind == "no permission":
        path.chmod(0)


@contextlib.contextmanager
def without_privileges(kind):
    if kind != "no permission" or os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def call(command, arguments):
    """Run a command as Invoke does; any exception except Exit fails the test."""
    with contextlib.suppress(Exit):
        tasks.namespace[command](CONTEXT, **arguments)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in COMMANDS for kind in (BINARY_KINDS if name.startswith("audit") else KINDS)],
)
def test_a_damaged_file_that_a_command_names_gives_no_traceback(tmp_path, name, kind, capsys):
    path = tmp_path / "folder" / f"x.{name.rpartition('.')[2]}"
    damage(path, kind)
    command, arguments = COMMANDS[name](path)
    with without_privileges(kind):
        call(command, arguments)
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name, commands in STATE.items() for command in commands]
)
def test_a_damaged_file_of_the_state_gives_no_traceback(name, command, kind, capsys):
    path = paths.state() / name
    shutil.rmtree(paths.state(), ignore_errors=True)
    paths.state().mkdir(mode=0o700, parents=True)  # records in folders or files open to others are not read
    damage(path, kind)
    if kind in CONTENTS:
        path.chmod(0o600)
    with without_privileges(kind):
        call(command, {})
    assert "Traceback" not in "".join(capsys.readouterr())
