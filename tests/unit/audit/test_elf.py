"""Host files made by the C++ compiler, and damaged ones."""

import struct

import pytest
from programs import compile_library

from sparkforge.audit import elf
from sparkforge.audit.cubins import Reader, Tools
from sparkforge.audit.rules import judge, load

pytestmark = [pytest.mark.needs("c++"), pytest.mark.timeout(60)]


@pytest.fixture
def library(tmp_path):
    text = '#include <cstdio>\nextern "C" int foreign();\nint offered() { return std::puts("x") + foreign(); }\n'
    return lambda name="one.so", *flags: compile_library(tmp_path / name, text, *flags)


def host(path):
    with elf.opened(path) as opened:
        return elf.host(opened)


def test_flags_of_the_linker_and_symbols_that_no_library_offers_are_seen(library):
    flags = "-Wl,-soname,other.so", "-Wl,-rpath,/opt/lib:$ORIGIN", "-Wl,-z,execstack"
    part = host(library("one.so", *flags))
    assert (part.soname, part.runpath, part.executable_stack) == ("other.so", ("/opt/lib", "$ORIGIN"), True)
    assert "foreign" in part.undefined
    assert "puts" not in part.undefined  # it has a version of the C library
    old = host(library("two.so", "-Wl,--disable-new-dtags,-rpath,/old"))
    assert old.runpath == ("/old",)


def test_a_truncated_library_and_a_table_with_entries_of_size_zero_are_damaged(library):
    whole = library().read_bytes()
    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        assert damage(library(), whole[: int(len(whole) * share)])
    for at in (58, 54):  # the tables of sections and of segments
        data = bytearray(whole)
        struct.pack_into("<H", data, at, 0)
        assert "entries of 0 bytes" in damage(library(), data)


SECTION_FIELDS = {"type": (4, "<I"), "offset": (24, "<Q"), "size": (32, "<Q"), "link": (40, "<I"), "info": (44, "<I")}


def changed(path, name, **fields):
    data = bytearray(path.read_bytes())
    table, width = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 58)[0]
    with elf.opened(path) as opened:
        number = opened.get_section_index(name)
    for field, value in fields.items():
        offset, form = SECTION_FIELDS[field]
        struct.pack_into(form, data, table + number * width + offset, value)
    return data


def section_place(path, name):
    with elf.opened(path) as opened:
        section = opened.get_section_by_name(name)
        return section["sh_offset"], section["sh_size"]


def damage(path, data):
    """Return the damage that our reader finds in a library with these bytes; NVIDIA's tools are missing."""
    path.write_bytes(data)
    rules = load()
    reader = Reader(Tools(path.parent / "none", path.parent / "none"), rules.watch())
    (binary,) = reader.finished([reader.draft(path, path.name)])
    assert [violation.rule for violation in judge(binary, rules)] == ["damaged"]
    return binary.damage


def test_versions_and_a_dynamic_section_without_end_are_damage(library):
    path = library()
    at, _ = section_place(path, ".gnu.version_r")
    data = changed(path, ".gnu.version_r", info=2**32 - 1)
    struct.pack_into("<I", data, at + 12, 0)  # vn_next
    assert f"section .gnu.version_r at byte {at}" in damage(path, data)
    path = library()
    at, size = section_place(path, ".dynamic")
    data = path.read_bytes()
    whole = data[:at] + struct.pack("<QQ", 1, 1) * (size // 16) + data[at + size :]
    assert f"section .dynamic at byte {at}" in damage(path, whole)


WRONG = [(name, {"link": link}) for name in (".dynamic", ".dynsym", ".gnu.version_r") for link in (0, 1, 2**32 - 1)]
WRONG += [(name, {"type": 1}) for name in (".dynamic", ".dynsym", ".gnu.version_r")]


def test_a_section_of_another_kind_size_or_link_is_damage_with_its_place(library):
    for name, fields in (*WRONG, (".dynsym", {"size": 2**40}), (".text", {"size": 2**40})):
        path = library()
        at, _ = section_place(path, name)
        assert f"section {name} at byte {at}" in damage(path, changed(path, name, **fields)), fields


def test_symbols_that_share_one_endless_name_are_damage(library, monkeypatch):
    path = library("one.so", f"-Doffered={'a' * 500}")
    with elf.opened(path) as opened:
        monkeypatch.setattr(elf, "MOST_NAMES", 100 + sum(len(section.name) for section in opened.iter_sections()))
    (at, size), (names, _) = section_place(path, ".dynsym"), section_place(path, ".dynstr")
    data = bytearray(path.read_bytes())
    name = data.index(b"a" * 500, names) - names
    for i in range(size // 24):
        struct.pack_into("<I", data, at + 24 * i, name)
    assert f"section .dynsym at byte {at}" in damage(path, data)
