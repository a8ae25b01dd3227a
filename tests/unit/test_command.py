"""The one exit point of tasks: whatever goes wrong is three lines and an exit code."""

import errno

import pytest
from invoke.exceptions import Exit

from sparkforge.command import arguments, command, listed, whole_number
from sparkforge.errors import FetchError, UsageError


def code_of(error):
    @command
    def task():
        raise error

    with pytest.raises(Exit) as caught:
        task()
    return caught.value.code


def test_our_errors_give_their_parts_and_their_code(capsys):
    assert code_of(FetchError("a failed", "because b", "./inv c")) == 11
    told = capsys.readouterr().err
    assert told.index("a failed") < told.index("because b") < told.index("./inv c")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT])
def test_a_file_that_cannot_be_used_is_named(number, capsys, tmp_path):
    assert code_of(OSError(number, "no such luck", str(tmp_path / "x"))) == 28
    told = capsys.readouterr().err
    assert f"{tmp_path}/x" in told
    assert f"ls -ld {tmp_path}" in told


def test_a_full_disk_has_its_own_code(tmp_path):
    assert code_of(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))) == 25
    assert code_of(OSError(errno.ENOSPC, "No space left on device")) == 25  # from an open file, without a name


def test_ctrl_c_is_what_shells_expect():
    assert code_of(KeyboardInterrupt()) == 130


def test_a_fault_of_ours_keeps_its_traceback():
    @command
    def task():
        raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file"):
        task()


def test_a_word_that_is_no_number_is_refused():
    assert whole_number("--port", "8000") == 8000
    with pytest.raises(UsageError, match="--port"):
        whole_number("--port", "x")


def test_words_between_commas_and_words_of_a_shell():
    assert listed("a, b,,c,") == ["a", "b", "c"]
    assert listed("") == []
    assert arguments("--more", "--build-context 'a b=c'") == ["--build-context", "a b=c"]
    with pytest.raises(UsageError, match="--more"):
        arguments("--more", "'a")
