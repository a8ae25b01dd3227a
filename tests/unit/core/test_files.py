import errno
import json
import os
import subprocess
import sys

import pytest
from expected import refused

from sparkforge.core.files import atomic_file, locked, require_space, write_atomic, write_json
from sparkforge.core.paths import ROOT


def test_a_failed_write_leaves_the_old_file_and_no_other_and_a_full_disk_is_named(tmp_path):
    target = tmp_path / "file"
    write_atomic(target, "old")

    def failing_write(error):
        with atomic_file(target) as file:
            file.write(b"half of the n")
            raise error

    with pytest.raises(RuntimeError):
        failing_write(RuntimeError)
    with refused("storage.full") as caught:
        failing_write(OSError(errno.ENOSPC, "No space left on device"))
    assert str(tmp_path) in caught.value.what
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


WRITER = """
import sys
from pathlib import Path
from sparkforge.core.files import atomic_file
with atomic_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_the_partial_file_of_a_killed_writer_is_removed_and_a_live_ones_stays(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    dead, live = (
        subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "file[1]"], cwd=ROOT, **pipes) for _ in range(2)
    )
    for writer in (dead, live):
        assert writer.stdout.readline() == b"writing\n"
    (tmp_path / ".other.x.tmp").touch()  # another file's
    dead.kill()
    dead.communicate()
    write_atomic(tmp_path / "file[1]", "new")
    assert len(list(tmp_path.glob(".file*.tmp"))) == 1
    live.communicate()
    assert sorted(os.listdir(tmp_path)) == [".other.x.tmp", "file[1]"]
    assert (tmp_path / "file[1]").read_text() == "half"


def test_space_is_checked_for_a_folder_that_does_not_exist_yet(tmp_path):
    require_space(tmp_path / "not" / "yet", 1, "a byte")
    with refused("storage.full", "needed"):
        require_space(tmp_path / "not" / "yet", 1 << 60, "an exabyte")


def test_a_lock_excludes_another_process_and_dies_with_its_holder(tmp_path):
    code = f"""
import pathlib
from sparkforge.core.files import locked
with locked(pathlib.Path({str(tmp_path / "lock")!r}), "hold"):
    print("held", flush=True); input()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    refusal = f"make it .*pid {holder.pid}: hold"
    with refused("storage.busy", refusal), locked(tmp_path / "lock", "make it"):
        pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path / "lock", "make it"):
        pass
    assert (tmp_path / "lock").read_text() == ""  # a free lock names no holder


def test_half_a_surrogate_pair_is_kept(tmp_path):
    """A model may write half a pair, and a file name that is not UTF-8 has one in Python."""
    write_json(tmp_path / "x.json", {"a": "ü\ud800", "b": "\udcff"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": "ü\ud800", "b": "\udcff"}
    write_atomic(tmp_path / "x.txt", "a\ud800")
    assert (tmp_path / "x.txt").read_bytes() == b"a\\ud800"
