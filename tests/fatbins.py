"""Minimal binaries for GPUs: cubins, and the fatbins of a library that contain them."""

import struct

from sparkforge.audit import elf

NAMES = b"\0.shstrtab\0.note.nv.tkinfo\0.text.kernel\0"


def cubin(target, number):
    """Return a minimal ELF file for a GPU: ptxas's options, and one kernel of two instructions."""
    note, code = f"ptxas -arch {target} ".encode(), bytes(32)
    at = {b".shstrtab": 64, b".note.nv.tkinfo": 64 + len(NAMES), b".text.kernel": 64 + len(NAMES) + len(note)}
    sizes = {b".shstrtab": len(NAMES), b".note.nv.tkinfo": len(note), b".text.kernel": len(code)}
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHI", 2, 190, 1)
    header += struct.pack("<QQQIHHHHHH", 0, 0, at[b".text.kernel"] + len(code), number << 8, 64, 56, 0, 64, 4, 1)
    rows = [
        struct.pack(
            "<IIQQQQIIQQ", NAMES.index(name), 3 if name == b".shstrtab" else 1, 0, 0, at[name], sizes[name], 0, 0, 1, 0
        )
        for name in at
    ]
    return b"".join([header, NAMES, note, code, bytes(64), *rows])


def entry(payload, unpacked=0, kind=elf.KIND_CUBIN, sm=90):
    """Return an entry of a fatbin; `unpacked` is the size before compression, 0 if uncompressed, as nvcc writes it."""
    padded = payload + bytes(-len(payload) % 8)
    packed = len(payload) if unpacked else 0
    return struct.pack("<HHIQI8xI24xQ", kind, 1, 64, len(padded), packed, sm, unpacked) + padded


def fatbin(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", elf.FATBIN_MAGIC, 1, 16, len(body)) + body
