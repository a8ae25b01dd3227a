import re
import shutil
import struct
import subprocess

import pytest

from sparkforge.compile import ninjafile
from sparkforge.compile.ninjafile import Statement

pytestmark = pytest.mark.needs("ninja", "c++")


def by_ninja(folder):
    """What ninja itself reads out of its log: {output: files}."""
    completed = subprocess.run(
        [shutil.which("ninja"), "-C", folder, "-t", "deps"], capture_output=True, text=True, check=True
    )
    edges, output = {}, ""
    for line in completed.stdout.splitlines():
        if match := re.match(r"(\S+): #deps", line):
            edges[output := match[1]] = ()
        elif line.startswith("    "):
            edges[output] += (line.strip(),)
    return edges


def test_the_latest_record_of_an_output_counts_and_a_torn_tail_does_not(cached):
    folder = cached.folders["page"]
    (cached.base / "include/new.cuh").write_text("")
    source = cached.base / "csrc/page.cu"
    source.write_text('#include "new.cuh"\n' + source.read_text())
    subprocess.run([shutil.which("ninja"), "-C", folder], check=True, capture_output=True)
    log = folder / ".ninja_deps"
    reported = ninjafile.reported(log)
    assert reported == by_ninja(folder)
    assert any(name.endswith("new.cuh") for name in reported[f"{folder}/page_kernel.cuda.o"])
    whole = log.read_bytes()
    for length in range(len(whole)):
        log.write_bytes(whole[:length])
        torn = ninjafile.reported(log)
        assert all(set(files) <= {*reported[output], f"{cached.base}/csrc/page.cu"} for output, files in torn.items())
    log.write_bytes(whole + b"\xff\xff")
    assert ninjafile.reported(log) == reported
    log.write_bytes(whole.replace(b"\x04\0\0\0", b"\x05\0\0\0", 1))
    assert ninjafile.reported(log) == {}


def test_escapes_variables_and_all_kinds_of_inputs(tmp_path):
    (tmp_path / "build.ninja").write_text(
        "top = /a\nsub = $top/b\nrule r\n  command = x\n  top = /wrong\n"
        "build ${top}/o$ 1.o $sub.d | side: r $top/x$:y.cu c.cu | implicit || order |@ valid\n  v = 1\nbuild broken\n"
    )
    assert ninjafile.statements(tmp_path / "build.ninja") == [
        Statement(("/a/o 1.o", "/a/b.d", "side"), "r", ("/a/x:y.cu", "c.cu", "implicit", "order", "valid"))
    ]
    assert ninjafile.statements(tmp_path / "none") == []
    doubling = ["v0 = xxxxxxxxxx", *(f"v{n + 1} = $v{n}$v{n}" for n in range(60)), "build $v60: rule a"]
    (tmp_path / "build.ninja").write_text("\n".join(doubling))
    assert ninjafile.statements(tmp_path / "build.ninja") == []


def deps(*records):
    """A log of ninja's dependencies, version 4; a record is (whether it is one of dependencies, its bytes)."""
    packed = [struct.pack("<I", len(data) | is_deps << 31) + data for is_deps, data in records]
    return ninjafile.MAGIC + struct.pack("<i", 4) + b"".join(packed)


def test_records_that_are_too_short_or_name_nothing_are_passed_over(tmp_path):
    path, name = tmp_path / ".ninja_deps", (False, b"a.o\0" + bytes(4))
    for numbers in ((0, 0), (-1, 0, 0, 0), (0, 0, 0, -1), (0, 0, 0, 1), (2**31 - 1, 0, 0)):
        path.write_bytes(deps(name, (True, struct.pack(f"<{len(numbers)}i", *numbers))))
        assert ninjafile.reported(path) == {}
    path.write_bytes(deps(name, (True, struct.pack("<4i", 0, 0, 0, 0))))
    assert ninjafile.reported(path) == {"a.o": ("a.o",)}
