"""Host files made by the C++ compiler, and damaged ones."""

import subprocess

import pytest

from forge import elf
from forge.audit_rules import judge, load
from forge.cubins import Reader, Tools

pytestmark = pytest.mark.needs("c++")


@pytest.fixture
def library(tmp_path):
    source = tmp_path / "one.cpp"
    source.write_text(
        '#include <cstdio>\nextern "C" int foreign();\nint offered() { return std::puts("x") + foreign(); }\n'
    )

    def make(name="one.so", *flags):
        command = ["c++", "-shared", "-fPIC", *flags, str(source), "-o", str(tmp_path / name)]
        subprocess.run(command, check=True, capture_output=True)
        return tmp_path / name

    return make


def host(path):
    with elf.opened(path) as opened:
        return elf.host(opened)


def test_what_a_library_needs_and_offers(library):
    found = host(library())
    assert found.shared
    assert "libc.so.6" in found.needed
    assert found.undefined == ("foreign",)  # puts has a version, the start-up files' symbols are weak
    assert "_Z7offeredv" in found.exports
    assert found.glibc >= (2, 2)
    assert (found.soname, found.runpath, found.executable_stack, found.cubins) == ("", (), False, 0)


def test_flags_of_the_linker_are_seen(library):
    flags = "-Wl,-soname,other.so", "-Wl,-rpath,/opt/lib:$ORIGIN", "-Wl,-z,execstack"
    found = host(library("one.so", *flags))
    assert (found.soname, found.runpath, found.executable_stack) == ("other.so", ("/opt/lib", "$ORIGIN"), True)
    old = host(library("two.so", "-Wl,--disable-new-dtags,-rpath,/old"))
    assert old.runpath == ("/old",)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_library_is_damaged(library, tmp_path, share):
    whole = library().read_bytes()
    cut = tmp_path / "cut.so"
    cut.write_bytes(whole[: int(len(whole) * share)])
    rules = load()
    # Neither program may be asked: the file is refused before.
    reader = Reader(Tools(tmp_path / "none", tmp_path / "none"), rules.watch())
    (binary,) = reader.finished([reader.draft(cut, "cut.so")])
    assert [one.rule for one in judge(binary, rules)] == ["damaged"]


def test_what_is_no_elf_is_damaged(tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(b"#!/bin/sh\n" * 100)
    assert Reader(Tools(path, path), load().watch()).draft(path, "x.so").binary.damage
