"""Honest and hostile archives: the result is complete and inside its folder, or absent."""

import gzip
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import zipfile

import pytest

from sparkforge.core.errors import IntegrityError
from sparkforge.sources import archive

FILES = {"p-1/a.txt": b"a" * 3000, "p-1/deep/er/b.bin": bytes(range(256)) * 40, "p-1/empty": b""}


def info(name, *, kind=tarfile.REGTYPE, size=0, mode=0o644, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.size, member.mode, member.linkname = kind, size, mode, link
    return member


def tar(path, members, *, pack=gzip.compress, form=tarfile.PAX_FORMAT):
    data = io.BytesIO()
    if isinstance(members, dict):
        members = [(info(name, size=len(body)), body) for name, body in members.items()]
    with tarfile.open(fileobj=data, mode="w", format=form) as out:
        for member, body in members:
            out.addfile(member, io.BytesIO(body))
    path.write_bytes(pack(data.getvalue()))
    return path


def refused(path, target, match, **kwargs):
    with pytest.raises(IntegrityError, match=match, check=lambda error: error.code == "integrity.archive"):
        archive.unpack(path, target, **kwargs)
    assert not target.exists()


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar"])
def test_an_honest_archive_is_unpacked_and_its_listing_is_what_sha256sum_checks(tmp_path, name):
    members = [(info("p-1/run", size=2, mode=0o4755), b"hi"), (info("p-1", kind=tarfile.DIRTYPE, mode=0o700), b"")]
    members += [(info(path, size=len(body)), body) for path, body in FILES.items()]
    source = tar(tmp_path / name, members, pack=gzip.compress if name.endswith("gz") else bytes)
    listing = archive.unpack(source, tmp_path / "t", top="p-1")
    assert listing == {
        "run": hashlib.sha256(b"hi").hexdigest(),
        **{path.removeprefix("p-1/"): hashlib.sha256(body).hexdigest() for path, body in FILES.items()},
    }
    assert (tmp_path / "t/deep/er/b.bin").read_bytes() == FILES["p-1/deep/er/b.bin"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "t").iterdir() if path.is_file()}
    assert modes == {"run": 0o755, "a.txt": 0o644, "empty": 0o644}  # the set-user-id bit is gone
    archive.write_listing(tmp_path / "t", listing)
    check = ["sha256sum", "--check", "--strict", "../t.sha256"]
    assert subprocess.run(check, cwd=tmp_path / "t", capture_output=True, check=False).returncode == 0
    assert archive.tree_sha256(archive.read_listing(tmp_path / "t")) == archive.tree_sha256(listing)


KINDS = {
    "symbolic link": (tarfile.SYMTYPE, "a.txt"), "hard link": (tarfile.LNKTYPE, "p-1/a.txt"),
    "character device": (tarfile.CHRTYPE, ""), "block device": (tarfile.BLKTYPE, ""), "fifo": (tarfile.FIFOTYPE, ""),
}  # fmt: skip


def test_members_other_than_plain_files_are_refused_with_their_name(tmp_path):
    for name, (kind, link) in KINDS.items():
        members = [(info("p-1/a.txt", size=1), b"a"), (info("p-1/odd", kind=kind, link=link), b"")]
        refused(tar(tmp_path / "a.tar.gz", members), tmp_path / "t", f"p-1/odd.*{name}", top="p-1")
    sparse = info("p-1/s", size=1)
    sparse.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "1099511627776", "GNU.sparse.numblocks": "1"}
    refused(tar(tmp_path / "a.tar.gz", [(sparse, b"x")]), tmp_path / "t", "p-1/s.*sparse file", top="p-1")
    refused(tar(tmp_path / "b.tar.gz", [(info("p-1/k", kind=b"K"), b"")]), tmp_path / "t", "refused", top="p-1")


@pytest.mark.parametrize(
    "path",
    ["../x", "/x", "p-1/../../x", "p-1/./x", "", "p-1/a\nb", "p-1/a\\..\\b", "C:/x", "p-1/\x7f", "p-1/" + "x" * 256,
     "elsewhere/x", "p-1"],
)  # fmt: skip
def test_a_path_that_could_lead_out_is_refused(tmp_path, path):
    refused(tar(tmp_path / "a.tar.gz", {"p-1/a.txt": b"a", path: b"x"}), tmp_path / "t", "refused", top="p-1")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.tar.gz"]
    if path not in {"", "elsewhere/x", "p-1"}:
        with zipfile.ZipFile(tmp_path / "w.whl", "w") as out:
            out.writestr("a", b"a")
            out.writestr(zipfile.ZipInfo(path), b"x")
        refused(tmp_path / "w.whl", tmp_path / "t", "refused")


@pytest.mark.parametrize(
    ("mode", "method", "reason"),
    [(0o120777, zipfile.ZIP_STORED, "pkg/odd.*symbolic link"), (0o20644, zipfile.ZIP_STORED, "pkg/odd.*special file"),
     (0o100644, zipfile.ZIP_LZMA, "packed by method 14")],
)  # fmt: skip
def test_a_wheel_with_a_link_a_device_or_another_packing_is_refused(tmp_path, mode, method, reason):
    member = zipfile.ZipInfo("pkg/odd")
    member.external_attr, member.compress_type = mode << 16, method
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as out:
        out.writestr(member, "target")
    refused(tmp_path / "w.whl", tmp_path / "t", reason)


def test_one_name_for_two_things_another_ending_and_a_file_in_the_way_are_refused(tmp_path):
    for names in (["p-1/a", "p-1/a"], ["p-1/a", "p-1/a/b"], ["p-1/a/b", "p-1/a"]):
        members = [(info(name, size=1), b"x") for name in names]
        refused(tar(tmp_path / "a.tar.gz", members), tmp_path / "t", "twice|both|file and a folder", top="p-1")
    (tmp_path / "a.rar").write_bytes(b"x")
    refused(tmp_path / "a.rar", tmp_path / "t", "not a .tar")
    (tmp_path / "t").mkdir()
    with pytest.raises(IntegrityError, match="in the way", check=lambda error: error.code == "integrity.archive"):
        archive.unpack(tmp_path / "a.rar", tmp_path / "t")


def test_a_bomb_too_many_members_and_a_header_that_fills_memory_are_refused(tmp_path, monkeypatch):
    bomb = {"p-1/a": b"", "p-1/zeros": bytes(archive.MIN_BOUND + 1)}
    refused(tar(tmp_path / "a.tar.gz", bomb), tmp_path / "t", "has more than.*p-1/zeros", top="p-1")
    with zipfile.ZipFile(tmp_path / "w.whl", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("zeros", bytes(archive.MIN_BOUND + 1))
    refused(tmp_path / "w.whl", tmp_path / "t", "has more than.*zeros")
    monkeypatch.setattr(archive, "MAX_MEMBERS", 3)
    refused(tar(tmp_path / "c.tar.gz", {f"p-1/{i}": b"" for i in range(4)}), tmp_path / "t", "more than 3", top="p-1")
    huge = info("p-1/x")
    huge.pax_headers = {"comment": "x" * (2 << 20)}
    refused(tar(tmp_path / "b.tar.gz", [(huge, b"")]), tmp_path / "t", "damaged", top="p-1")


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_an_archive_cut_anywhere_is_refused(tmp_path, pack):
    name = "a.tar" if pack is bytes else "a.tar.gz"
    whole = tar(tmp_path / name, FILES, pack=pack).read_bytes()
    end = len(whole) if pack is gzip.compress else len(whole.rstrip(b"\0")) + 512
    for length in [*range(0, end, max(1, end // 200)), *range(0, end, 512)]:
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(IntegrityError, check=lambda error: error.code == "integrity.archive"):
            archive.unpack(tmp_path / name, tmp_path / "t", top="p-1")
        assert not (tmp_path / "t").exists()


def test_a_damaged_header_does_not_count_as_the_end(tmp_path):
    whole = bytearray(tar(tmp_path / "a.tar", FILES, pack=bytes).read_bytes())
    second = whole.index(b"p-1/deep")
    whole[second] ^= 1
    (tmp_path / "a.tar").write_bytes(whole)
    refused(tmp_path / "a.tar", tmp_path / "t", "end", top="p-1")
    (tmp_path / "b.tar").write_bytes(tar(tmp_path / "a.tar", FILES, pack=bytes).read_bytes() + b"more")
    refused(tmp_path / "b.tar", tmp_path / "t", "follows its end", top="p-1")


@pytest.mark.parametrize("offset", [0xFFFFFFFE, 0x7FFFFFFF])
def test_a_zip_with_an_impossible_offset_is_refused(tmp_path, offset):
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as out:
        out.writestr("a", b"x")
    data = bytearray((tmp_path / "w.whl").read_bytes())
    for place in (data.index(b"PK\x01\x02") + 42, data.index(b"PK\x05\x06") + 16):  # the member's, the directory's
        data[place : place + 4] = offset.to_bytes(4, "little")
        (tmp_path / "w.whl").write_bytes(data)
        refused(tmp_path / "w.whl", tmp_path / "t", "refused")


def test_endless_zeros_after_a_tars_end_are_not_read(tmp_path):
    path = tar(tmp_path / "a.tar", {"p-1/a.txt": b"a"}, pack=bytes)
    os.truncate(path, 8 << 40)  # sparse; reading 8 TB would not end
    refused(path, tmp_path / "t", "bytes follow its end", top="p-1")
