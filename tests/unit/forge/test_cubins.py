"""Cubins in fatbins, read where they lie: plain, packed by zstd, damaged. They are for 9.0a, so no program is asked."""

import struct
import subprocess

import pytest
import zstandard

from forge import cubins, elf
from forge.audit_rules import judge, load
from forge.cubins import Reader, Tools

pytestmark = pytest.mark.needs("c++")
TARGET = "sm_90a"
ENDLESS = elf.ZSTD + b"\xe0" + struct.pack("<Q", 1 << 40) + bytes(64)  # RFC 8878: one segment, its size in 8 bytes
NAMES = b"\0.shstrtab\0.note.nv.tkinfo\0.text.kernel\0"


def section(name, kind, at, size):
    return struct.pack("<IIQQQQIIQQ", NAMES.index(name), kind, 0, 0, at, size, 0, 0, 1, 0)


def cubin(target=TARGET):
    """The least that an ELF file for a GPU can be: what ptxas was told, and one kernel of two instructions."""
    note, code = f"ptxas -arch {target} ".encode(), bytes(32)
    at = {b".shstrtab": 64, b".note.nv.tkinfo": 64 + len(NAMES), b".text.kernel": 64 + len(NAMES) + len(note)}
    sizes = {b".shstrtab": len(NAMES), b".note.nv.tkinfo": len(note), b".text.kernel": len(code)}
    table = at[b".text.kernel"] + len(code)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHI", 2, 190, 1)
    header += struct.pack("<QQQIHHHHHH", 0, 0, table, 90 << 8, 64, 56, 0, 64, 4, 1)
    rows = [section(name, 3 if name == b".shstrtab" else 1, at[name], sizes[name]) for name in at]
    return b"".join([header, NAMES, note, code, bytes(64), *rows])


def entry(payload, unpacked=0, kind=elf.KIND_CUBIN, sm=90):
    """One entry of a fatbin; `unpacked` as nvcc writes it: the size before packing, 0 where nothing is packed."""
    padded = payload + bytes(-len(payload) % 8)
    packed = len(payload) if unpacked else 0
    return struct.pack("<HHIQI8xI24xQ", kind, 1, 64, len(padded), packed, sm, unpacked) + padded


def fatbin(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", elf.FATBIN_MAGIC, 1, 16, len(body)) + body


def packed(data, size=None):
    return entry(zstandard.compress(data), len(data) if size is None else size)


@pytest.fixture
def read(tmp_path):
    """Put fatbins into a library and return what our reader says of it; neither of NVIDIA's programs can be asked."""

    def made(*fatbins):
        (tmp_path / "all.fatbin").write_bytes(b"".join(fatbins))
        source = tmp_path / "one.s"
        source.write_text(
            f'.section .nv_fatbin,"a"\n.balign 8\n.incbin "{tmp_path}/all.fatbin"\n'
            '.section .note.GNU-stack,"",@progbits\n'
        )
        library = tmp_path / "one.so"
        command = ["c++", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        reader = Reader(Tools(tmp_path / "none", tmp_path / "none"), load().watch())
        return reader.finished([reader.draft(library, "one.so")])[0]

    return made


def rules_of(binary):
    return [one.rule for one in judge(binary, load())]


def test_plain_and_packed_cubins_are_read_where_they_lie(read):
    ptx = entry(b".version 8.7", kind=elf.KIND_PTX, sm=120)
    found = read(fatbin(entry(cubin()), ptx), bytes(64), fatbin(packed(cubin("sm_80"))))
    assert found.damage == ""
    assert [(one.name, one.target, one.sm, one.size, one.loads) for one in found.cubins] == [
        ("one.1.sm_90.cubin", TARGET, 90, len(cubin()) + -len(cubin()) % 8, False),
        ("one.2.sm_90.cubin", "sm_80", 90, len(cubin("sm_80")), False),
    ]
    assert (found.host.cubins, found.host.ptx) == (2, ("compute_120",))
    assert rules_of(found) == ["wrong-arch"]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda: entry(cubin()[:-64]), id="cut inside"),
        pytest.param(lambda: packed(cubin(), len(cubin()) + 8), id="another size than the fatbin says"),
        pytest.param(lambda: packed(cubin()[:-64]), id="cut before it was packed"),
        pytest.param(lambda: entry(zstandard.compress(cubin())[:-9], len(cubin())), id="cut after it was packed"),
        pytest.param(lambda: packed(bytes(4096)), id="no cubin"),
        pytest.param(lambda: entry(elf.ZSTD + bytes(4092)), id="packed by nobody"),
        pytest.param(lambda: entry(ENDLESS, 1 << 40), id="a terabyte once it is unpacked"),
        pytest.param(lambda: entry(zstandard.compress(cubin())), id="packed, and the fatbin says that it is not"),
    ],
)
def test_damaged_cubins_are_said_to_be(read, broken):
    whole = read(fatbin(packed(cubin())))
    assert rules_of(whole) == ["wrong-arch"]
    assert rules_of(read(fatbin(packed(cubin()), broken()))) == ["damaged"]


def test_what_is_packed_otherwise_is_left_to_cuobjdump(read):
    """Such as LZ4: here cuobjdump is not there, and that is what the damage says."""
    found = read(fatbin(entry(cubin()), entry(b"\xf0\x1flz4 would be here", len(cubin()))))
    assert "none" in found.damage


def test_without_the_unpacker_cuobjdump_is_asked(read, monkeypatch):
    monkeypatch.setattr(cubins, "READABLE", (elf.ELF,))
    assert read(fatbin(entry(cubin()))).damage == ""
    assert "none" in read(fatbin(packed(cubin()))).damage
