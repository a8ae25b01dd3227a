"""The common exit point of tasks: every error gives three lines and an exit code."""

import errno
import json
import lzma
import os
import socket
import ssl
import struct
import subprocess
import sys
import tomllib
import traceback

import pytest
from invoke.exceptions import Exit

from sparkforge.cli.command import command, whole_number
from sparkforge.core import paths
from sparkforge.core.errors import NetworkError, UsageError


def code_of(error):
    @command
    def task():
        raise error

    with pytest.raises(Exit) as caught:
        task()
    return caught.value.code


def test_our_errors_give_their_parts_and_their_code_and_ctrl_c_the_code_of_shells(capsys):
    assert code_of(NetworkError("a failed", "because b", "./inv c", code="network.fetch")) == 11
    printed = capsys.readouterr().err
    assert printed.index("a failed") < printed.index("because b") < printed.index("./inv c")
    assert code_of(KeyboardInterrupt()) == 130


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, "access"), (errno.ENOENT, "access"), (errno.ENOSPC, "full")]
)
def test_a_file_that_cannot_be_used_is_named(number, code, capsys, tmp_path):
    assert code_of(OSError(number, "no such luck", str(tmp_path / "x"))) == 28
    printed = capsys.readouterr().err
    assert f"[storage.{code}]" in printed
    assert str(tmp_path) in printed
    assert code_of(OSError(errno.ENOSPC, "No space left on device")) == 28  # from an open file, without a name


@pytest.mark.parametrize("error", [AssertionError(), ValueError("x")])
def test_a_bug_keeps_its_traceback_and_says_how_to_report_it(error):
    @command
    def task():
        raise error

    with pytest.raises(type(error)) as caught:
        task()
    assert "./inv doctor --bundle" in "".join(traceback.format_exception(caught.value))


BAD_INPUT = {
    "a file without its name": (lambda: ssl.create_default_context(cafile="/nonexistent"), 28),
    "a bad descriptor": (lambda: os.fsync(999_999), 28),
    "a name with a NUL": (lambda: open("a\0b"), 28),  # noqa: PTH123, SIM115
    "deep JSON": (lambda: json.loads("[" * 200_000), 28),
    "no TOML": (lambda: tomllib.loads("a ="), 28),
    "no UTF-8": (b"\xff".decode, 28),
    "no memory": (lambda: bytearray(1 << 60), 50),
    "no xz": (lambda: lzma.decompress(b"xz"), 28),
    "a number that is too large": (lambda: bytes(1 << 70), 28),
    "a cut structure": (lambda: struct.unpack("<Q", b""), 28),
    "a host that is not there": (lambda: socket.create_connection(("host.invalid", 1)), 11),
    "nobody listens": (lambda: socket.create_connection(("127.0.0.1", 1)), 11),
}


@pytest.mark.parametrize(("function", "code"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_undeclared_errors_of_bad_input_are_three_lines(function, code, capsys):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        function()
    assert code_of(caught.value) == code
    lines = capsys.readouterr().err.splitlines()
    assert [line[:8] for line in lines[:3]] == [f"✗ {lines[0][2:]}"[:8], "  why:  ", "  next: "]
    assert len(lines) == 3


def test_an_answer_with_half_a_surrogate_pair_is_printed():
    code = "from sparkforge.cli.command import command; command(lambda: print('a' + chr(0xd800) + 'b'))()"
    result = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (0, b"a\\ud800b\n")


def test_a_word_that_is_no_number_is_refused():
    assert whole_number("--port", "8000") == 8000
    for text in ("x", "1e999", "NaN", "9" * 5000, "\ud800", "٣٤", "8_000", " 8"):
        with pytest.raises(UsageError, match="--port") as caught:
            whole_number("--port", text)
        assert len(caught.value.what) < 100
