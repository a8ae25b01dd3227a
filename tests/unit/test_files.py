import errno
import os
import subprocess
import sys

import pytest

from sparkforge.errors import BusyError, DiskFullError, UsageError
from sparkforge.files import atomic_file, locked, require_space, require_writable, write_atomic, write_json


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "file"
    write_atomic(target, "old")

    def failing_write():
        with atomic_file(target) as file:
            file.write(b"half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing_write()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    def failing_write():
        with atomic_file(tmp_path / "file"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFullError) as caught:
        failing_write()
    assert str(tmp_path) in caught.value.what
    assert os.listdir(tmp_path) == []


def test_json_is_sorted_readable_and_ends_with_a_newline(tmp_path):
    write_json(tmp_path / "x.json", {"b": 1, "a": "ü"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "a": "ü",\n  "b": 1\n}\n'


def test_space_is_asked_for_where_the_folder_will_be(tmp_path):
    require_space(tmp_path / "not" / "yet", 1, "a byte")
    with pytest.raises(DiskFullError, match="needed"):
        require_space(tmp_path / "not" / "yet", 1 << 60, "an exabyte")


def test_a_lock_excludes_another_process_and_dies_with_its_holder(tmp_path):
    code = f"""
import pathlib
from sparkforge.files import locked
with locked(pathlib.Path({str(tmp_path / "lock")!r}), "hold"):
    print("held", flush=True); input()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BusyError, match="make it"), locked(tmp_path / "lock", "make it"):
        pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path / "lock", "make it"):
        pass


def test_a_place_for_results_is_made_and_left_empty(tmp_path):
    place = tmp_path / "new" / "result.json"
    assert require_writable(place) == place
    assert list(place.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["", "file/below.json", "/proc/1/result.json"])
def test_a_place_where_no_file_can_be_is_refused_before_the_work(tmp_path, name):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="cannot write"):
        require_writable(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"
