"""Cubins in fatbins, read in place: plain, packed by zstd, damaged. They are for 9.0a, so NVIDIA's tools do not run."""

import hashlib
import struct

import fatbins
import pytest
import zstandard
from fatbins import entry, fatbin
from invoke.program import Program
from programs import compile_library, write_program

import tasks
from sparkforge.audit import cubins, elf
from sparkforge.audit.cubins import Reader, Tools
from sparkforge.audit.rules import judge, load
from sparkforge.core.errors import AuditError

pytestmark = [pytest.mark.needs("c++"), pytest.mark.timeout(60)]
TARGET = "sm_90a"
ENDLESS = elf.ZSTD + b"\xe0" + struct.pack("<Q", 1 << 40) + bytes(64)  # RFC 8878: one segment, its size in 8 bytes


def cubin(target=TARGET):
    return fatbins.cubin(target, 90)


def packed(data, size=None):
    return entry(zstandard.compress(data), len(data) if size is None else size)


@pytest.fixture
def library(tmp_path):
    def make(*fatbins):
        (tmp_path / "all.fatbin").write_bytes(b"".join(fatbins))
        text = f'.section .nv_fatbin,"a"\n.balign 8\n.incbin "{tmp_path}/all.fatbin"\n'
        text += '.section .note.GNU-stack,"",@progbits\n'
        return compile_library(tmp_path / "one.so", text, language="assembler")

    return make


@pytest.fixture
def read(library, tmp_path):
    """Put fatbins into a library and return our reader's result; NVIDIA's tools are missing."""

    def make(*fatbins):
        reader = Reader(Tools(tmp_path / "none", tmp_path / "none"), load().watch())
        return reader.finished([reader.draft(library(*fatbins), "one.so")])[0]

    return make


def rules_of(binary):
    return [violation.rule for violation in judge(binary, load())]


def test_plain_and_compressed_cubins_are_read_in_place(read):
    ptx = entry(b".version 8.7", kind=elf.KIND_PTX, sm=120)
    code = read(fatbin(entry(cubin()), ptx), bytes(64), fatbin(packed(cubin("sm_80"))))
    assert code.damage == ""
    assert [(item.name, item.target, item.sm, item.size, item.loads) for item in code.cubins] == [
        ("one.1.sm_90.cubin", TARGET, 90, len(cubin()) + -len(cubin()) % 8, False),
        ("one.2.sm_90.cubin", "sm_80", 90, len(cubin("sm_80")), False),
    ]
    assert (code.host.cubins, code.host.ptx) == (2, ("compute_120",))
    assert code.cubins[1].sha256 == hashlib.sha256(cubin("sm_80")).hexdigest(), "as unpacked"
    assert rules_of(code) == ["wrong-arch"]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda: entry(cubin()[:-64]), id="cut inside"),
        pytest.param(lambda: packed(cubin(), len(cubin()) + 8), id="another size than the fatbin says"),
        pytest.param(lambda: entry(zstandard.compress(cubin())[:-9], len(cubin())), id="cut after it was packed"),
        pytest.param(lambda: packed(bytes(4096)), id="no cubin"),
        pytest.param(lambda: entry(ENDLESS, 1 << 40), id="a terabyte once it is unpacked"),
        pytest.param(lambda: entry(zstandard.compress(cubin())), id="packed, and the fatbin says that it is not"),
    ],
)
def test_damaged_cubins_are_reported(read, broken):
    whole = read(fatbin(packed(cubin())))
    assert rules_of(whole) == ["wrong-arch"]
    assert rules_of(read(fatbin(packed(cubin()), broken()))) == ["damaged"]


def test_other_compressions_are_left_to_cuobjdump(read):
    """The cubin is packed by LZ4. cuobjdump is missing here, and the damage says so."""
    code = read(fatbin(entry(cubin()), entry(b"\xf0\x1flz4 would be here", len(cubin()))))
    assert "none" in code.damage


def test_a_fatbin_that_leads_nowhere_is_damage_with_its_place(read):
    for broken, why in (
        (struct.pack("<IHHQ", elf.FATBIN_MAGIC, 1, 0, 0), "header of 0 bytes"),
        (fatbin(struct.pack("<HHIQ", 2, 1, 0, 0) + bytes(48)), "0 + 0 bytes"),
        (fatbin(struct.pack("<HHIQ", 2, 1, 64, 2**63) + bytes(48)), "are left"),
        (struct.pack("<IHHQ", elf.FATBIN_MAGIC, 1, 16, 2**63), "past its section"),
    ):
        code = read(broken)
        assert why in code.damage
        assert "section .nv_fatbin at byte" in code.damage
        assert rules_of(code) == ["damaged"]


def test_more_entries_or_bytes_than_any_library_has_are_damage(read, monkeypatch):
    assert "once they are unpacked" in read(fatbin(*[packed(cubin(), 5 << 30)] * 4)).damage
    with monkeypatch.context() as patch:
        patch.setattr(elf, "MOST_ENTRIES", 3)
        assert "more than 3 entries" in read(fatbin(*[entry(cubin())] * 4)).damage
    large = elf.ZSTD + b"\xe0" + struct.pack("<Q", 1 << 30) + bytes(64)
    assert "cannot be unpacked to the 1073741824 bytes" in read(fatbin(entry(large, 1 << 30))).damage


@pytest.mark.parametrize(
    ("flags", "target"), [(0x4B054B, "sm_75"), (0x500550, "sm_80"), (0x5A055A, "sm_90"), (0x5A0D5A, "sm_90a")]
)
def test_the_flags_of_an_older_cubin_give_its_target(read, flags, target):
    """The flags are from libraries of bitsandbytes 0.50.2 for CUDA 12.4, and of xformers 0.0.35 for 9.0a."""
    data = bytearray(cubin().replace(b"-arch", b"-none"))
    data[8], data[48:52] = elf.OLD_ABI, struct.pack("<I", flags)
    (code,) = read(fatbin(entry(bytes(data)))).cubins
    assert (code.target, code.sm, code.loads) == (target, int(target[3:5]), False)


def test_the_text_of_ptx_gives_its_target(read):
    text = b".version 8.7\n.target sm_120f\n"
    for data, size, sm, target in (
        (b"<packed by LZ4", 4096, 90, "compute_90"), (text, 0, 120, "compute_120f"),
        (zstandard.compress(text), len(text), 120, "compute_120f"),
    ):  # fmt: skip
        assert read(fatbin(entry(data, size, elf.KIND_PTX, sm))).host.ptx == (target,)


def test_the_command_refuses_only_our_own_library_that_holds_nothing_but_ptx_for_12_1(
    library, tmp_path, monkeypatch, capfd
):
    for name in ("cuobjdump", "nvdisasm"):
        write_program(tmp_path / "cuda/bin" / name, "exit 1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    path = library(fatbin(entry(b".version 8.7", kind=elf.KIND_PTX, sm=121)))
    Program(namespace=tasks.namespace).run(f"inv audit {path}", exit=False)
    assert "compute_121 (PTX)  compiled by the driver" in capfd.readouterr().out
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        Program(namespace=tasks.namespace).run(f"inv audit {path}", exit=True)
    assert ended.value.code == AuditError.exit_code
    assert "wrong-arch" in (err := capfd.readouterr().err)
    assert "compute_121 and no machine code" in err


def test_sections_of_a_cubin_may_not_overlap_but_one_that_ptxas_lists_twice():
    data = bytearray(cubin())
    table = struct.unpack_from("<Q", data, 40)[0]
    for number in (1, 2, 3):
        struct.pack_into("<QQ", data, table + 64 * number + 24, 0, len(data))
    with pytest.raises(elf.CutError, match="overlap"):
        elf.code(bytes(data))
    data = bytearray(cubin().replace(b".note.nv.tkinfo", b".nv.merc.nv.abc"))
    table = struct.unpack_from("<Q", data, 40)[0]
    struct.pack_into("<QQ", data, table + 64 * 2 + 24, 0, len(data))
    assert [name for name, _ in elf.code(bytes(data)).kernels()] == ["kernel"]
    struct.pack_into("<QQ", data, table + 64 * 3 + 24, 0, len(data))  # the kernel
    with pytest.raises(elf.CutError, match="overlap"):
        elf.code(bytes(data))


def test_numbers_of_sections_and_instruction_kinds_are_limited(monkeypatch):
    monkeypatch.setattr(elf, "MOST_NAMES", 20)
    with pytest.raises(elf.CutError, match="names of its sections"):
        elf.code(cubin())
    with pytest.raises(ValueError, match="kinds of instructions"):
        cubins.count([("k", b"".join(bytes(9) + struct.pack("<I3x", number) for number in range(1 << 18 | 1)))])
