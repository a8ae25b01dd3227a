"""Patched wheels and source archives: contents, reproducible bytes, and refused inputs."""

import base64
import csv
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from types import SimpleNamespace

import pytest
from expected import refused

from lab.patches.lock import lock_stack, write_patched
from sparkforge.core.errors import PatchError
from sparkforge.core.files import sha256_file
from sparkforge.core.installed import parse_record, record_digest
from sparkforge.patching import wheels
from sparkforge.patching.series import Queue
from sparkforge.pins import Component, Pins, verify
from sparkforge.sources import bundle, fetch, offline

BEFORE = {
    "lib/data/kernel.cu": "slow\n", "lib/a.py": "".join(f"line {number}\n" for number in range(12)),
    "lib/E=8,N=7.json": "{}\n", "lib/gone.py": "gone\n", "lib/big.bin": "x" * 70_000,
    "up-1.0.data/scripts/tool": "#!/bin/sh\n",
}  # fmt: skip
PATCHED = {"lib/a.py": BEFORE["lib/a.py"].replace("line 5", "LINE 5"), "lib/gone.py": None, "lib/new/n.py": "new\n",
           "lib/another.py": "another\n"}  # fmt: skip
INFO, OURS = "up-1.0.dist-info", "up-1.0+sparkforge.1.dist-info"
NAME = "up-1.0-py3-none-any.whl"


@pytest.fixture
def world(kit, tmp_path, monkeypatch, patched_wheel, patched_lock):
    """The upstream `up` 1.0: a wheel and a source archive in the cache, a queue for both, and a separate lock."""
    body = kit.diff(tmp_path / "diff", BEFORE, {**BEFORE, **PATCHED})
    body += kit.diff(tmp_path / "kernel", {"src/kernel.cu": "slow\n"}, {"src/kernel.cu": "fast\n"})
    folder = kit.write_queue(tmp_path / "patches" / "up-1.0", body)
    (folder / "installed").write_text("src lib/data\n")

    def seed(file):
        return fetch.cached(file.name, kit.seed(file.name, file.read_bytes()))

    wheel = seed(patched_wheel.build(tmp_path, {path: text.encode() for path, text in BEFORE.items()}, "up", "1.0"))
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as out:
        more = {"PKG-INFO": "Name: up\nVersion: 1.0\n\nVersion: 1.0\n", "src/kernel.cu": "slow\n"}
        for path, text in {**more, **BEFORE}.items():
            info = tarfile.TarInfo(f"up-1.0/{path}")
            info.size, info.mode, info.mtime = len(text.encode()), 0o775 if path.endswith("tool") else 0o664, 12345
            out.addfile(info, io.BytesIO(text.encode()))
    sdist = tmp_path / "up-1.0.tar.gz"
    sdist.write_bytes(data.getvalue())
    sdist = seed(sdist)

    def component(*files, version="1.0"):
        pinned = {file.name: {"sha256": sha256_file(file), "size": "unknown"} for file in files}
        return Component(version=version, kind="wheel", package="up", licence="MIT", why="test", patches="up-1.0",
                         files=pinned)  # fmt: skip

    pinned = component(sdist, wheel)
    stack = {"summary": "a stack", "components": {"up": pinned}}
    table = Pins.model_validate({"schema": 1, "default": "s", "stacks": {"s": stack}})

    def make(source, target, revision=1, version="1.0"):
        with target.open("wb") as output:
            return wheels.make(source, component(source, version=version), Queue.load(folder), revision, output)

    return SimpleNamespace(
        wheel=wheel, sdist=sdist, folder=folder, patches=folder.parent, component=pinned, table=table, make=make,
        lock=lambda: lock_stack("s", table=table, patches=folder.parent),
        patched=lambda name=NAME: wheels.patched(pinned, name, patches=folder.parent),
    )  # fmt: skip


def contents(file):
    with zipfile.ZipFile(file) as opened:
        assert opened.testzip() is None
        return {info.filename: opened.read(info) for info in opened.infolist()}


def packed(file, name):
    with zipfile.ZipFile(file) as opened, file.open("rb") as raw:
        info = opened.getinfo(name)
        raw.seek(info.header_offset + 26)
        sizes = raw.read(4)
        raw.seek(int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little"), 1)
        return raw.read(info.compress_size)


def test_a_patched_wheel_has_upstreams_members_in_their_order_and_the_patched_ones(world, tmp_path):
    lock = world.make(world.wheel, tmp_path / "out.whl")
    before, after = contents(world.wheel), contents(tmp_path / "out.whl")
    renamed = [name.replace("up-1.0.d", "up-1.0+sparkforge.1.d") for name in before if name != "lib/gone.py"]
    assert [name for name in after if name in renamed] == renamed
    assert list(after)[-1] == f"{OURS}/RECORD"
    assert {name: after[name].decode() for name in PATCHED if name in after} == {
        name: text for name, text in PATCHED.items() if text is not None
    }
    assert after["lib/data/kernel.cu"] == b"fast\n"  # `src/kernel.cu` of the source archive
    ours = before[f"{INFO}/METADATA"].replace(b"Version: 1.0\n", b"Version: 1.0+sparkforge.1\n")
    assert after[f"{OURS}/METADATA"] == ours
    assert packed(tmp_path / "out.whl", "lib/big.bin") == packed(world.wheel, "lib/big.bin")
    with zipfile.ZipFile(tmp_path / "out.whl") as opened:
        assert {info.date_time for info in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert (lock.file, lock.revision, lock.queue) == ("up-1.0+sparkforge.1-py3-none-any.whl", 1, "up-1.0")
    assert (lock.sha256, lock.size) == (sha256_file(tmp_path / "out.whl"), (tmp_path / "out.whl").stat().st_size)


def test_it_lists_every_member_by_hash_and_what_it_was_made_from(world, tmp_path, kit, patched_wheel):
    lock = world.make(world.wheel, tmp_path / "out.whl")
    files, queue = contents(tmp_path / "out.whl"), Queue.load(world.folder)
    text = files.pop(f"{OURS}/RECORD").decode()
    rows = list(csv.reader(io.StringIO(text)))
    assert rows.pop() == [f"{OURS}/RECORD", "", ""]
    assert {path: (digest, int(size)) for path, digest, size in rows} == {
        path: ("sha256=" + patched_wheel.encoded(data), len(data)) for path, data in files.items()
    }
    assert lock.record == record_digest(parse_record(text, "RECORD"))

    (patch,) = queue.patches
    assert files[f"{OURS}/patches/{patch.name}"] == (world.folder / patch.name).read_bytes()
    assert files[f"{OURS}/patches/series"].decode() == f"{patch.name}\n"
    document = json.loads(files[f"{OURS}/patches/upstream.json"])
    assert document.pop("files")["lib/gone.py"] == {"before": hashlib.sha256(b"gone\n").hexdigest(), "after": None}
    assert document == {
        "schema": 1, "upstream": "up", "version": "1.0", "filename": NAME, "sha256": sha256_file(world.wheel),
        "queue_sha256": queue.sha256, "patches": [{"name": patch.name, "sha256": patch.sha256}],
    }  # fmt: skip
    site = kit.write(tmp_path / "site", files)
    assert verify.read_origin(site / OURS).files["lib/new/n.py"].before is None


def test_without_a_network_it_is_made_of_upstreams_wheel_in_a_bundle(world, tmp_path, monkeypatch):
    for name in (offline.VARIABLE, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")  # so that pytest restores them: `offline.use` sets them permanently
    world.lock()
    path = f"files/{sha256_file(world.wheel)}/{NAME}"
    bundle.write(tmp_path / "b.tar", [bundle.BundleMember.of(path, world.wheel)], [], {})
    bundle.unpack(tmp_path / "b.tar", tmp_path / "unpacked")
    monkeypatch.setenv("SPARKFORGE_CACHE", str(tmp_path / "another machine's"))
    offline.use(tmp_path / "unpacked")
    wheel = world.patched()
    assert wheel.is_new
    assert wheel.path.is_relative_to(tmp_path / "another machine's")
    assert sha256_file(wheel.path) == wheel.lock.sha256


MAKE = """
import os, sys
from pathlib import Path
from sparkforge.patching import wheels
from sparkforge.patching.series import Queue
from sparkforge.pins import Component
source, folder, output, umask = sys.argv[1:]
os.umask(int(umask, 8))
files = {Path(source).name: {"sha256": "0" * 64, "size": "unknown"}}
words = {"version": "1.0", "kind": "wheel", "package": "up", "licence": "MIT", "why": "test", "patches": "up-1.0"}
component = Component(**words, files=files)
with open(output, "wb") as file:
    print(wheels.make(Path(source), component, Queue.load(Path(folder)), 1, file).sha256)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_bytes_are_the_same_in_every_process(world, tmp_path, kind):
    arguments = [sys.executable, "-c", MAKE, str(getattr(world, kind)), str(world.folder), str(tmp_path / "out")]
    hashes = set()
    for seed, zone, umask in (("1", "UTC", "022"), ("2", "Asia/Tokyo", "077"), ("3", "America/Lima", "000")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone}
        result = subprocess.run([*arguments, umask], env=environment, capture_output=True, text=True, check=True)
        hashes.add(result.stdout)
    assert len(hashes) == 1


def test_a_patched_source_archive_has_the_patched_files_and_our_version(world, tmp_path):
    lock = world.make(world.sdist, tmp_path / "out.tar.gz")
    assert (lock.file, lock.record) == ("up-1.0+sparkforge.1.tar.gz", None)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress((tmp_path / "out.tar.gz").read_bytes()))) as tar:
        files = {info.name.removeprefix("up-1.0+sparkforge.1/"): tar.extractfile(info).read().decode() for info in tar}
        modes = {info.name.rpartition("/")[2]: (info.mode, info.mtime, info.uid) for info in tar}
    assert files["PKG-INFO"] == "Name: up\nVersion: 1.0+sparkforge.1\n\nVersion: 1.0\n"
    patched_files = [files[name] for name in ("src/kernel.cu", "lib/a.py", "lib/new/n.py")]
    assert patched_files == ["fast\n", PATCHED["lib/a.py"], "new\n"]
    assert "lib/gone.py" not in files
    assert json.loads(files[".sparkforge-patches/upstream.json"])["filename"] == "up-1.0.tar.gz"
    assert (modes["tool"], modes["a.py"]) == ((0o755, 0, 0), (0o644, 0, 0))
    result = subprocess.run(["tar", "-tzf", str(tmp_path / "out.tar.gz")], capture_output=True, check=True)  # noqa: S607
    assert result.stdout


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


def other_version(files):
    path = f"{INFO}/METADATA"
    data = files[path].replace(b"Version: 1.0", b"Version: 2")
    lines = [line for line in files[RECORD].splitlines(keepends=True) if not line.startswith(path.encode())]
    encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    lines.insert(0, b"%s,sha256=%s,%d\n" % (path.encode(), encoded, len(data)))
    return {**files, path: data, RECORD: b"".join(lines)}


RECORD = f"{INFO}/RECORD"
MALFORMED = {
    "a member that leads out": (lambda files: {**files, "../x": b""}, "points outside"),
    "a link": (lambda files: [*files.items(), (link("lib/link"), b"/etc")], "symbolic link"),
    "a member twice": (lambda files: [*files.items(), ("lib/big.bin", b"")], "lib/big.bin' is in it twice"),
    "no dist-info": (lambda files: {"lib/a.py": b""}, "dist-info"),
    "another version": (lambda files: {name.replace("1.0.dist", "1.1.dist"): files[name] for name in files}, "1.0"),
    "a short line of RECORD": (lambda files: {**files, RECORD: files[RECORD] + b"x\n"}, "path,hash,size"),
    "another hash in RECORD": (lambda files: {**files, "lib/a.py": b"x"}, "lib/a.py is not the file"),
    "another version in METADATA": (other_version, "does not say"),
    "another METADATA": (lambda files: {**files, f"{INFO}/METADATA": b"Version: 1.0\n"}, "METADATA is not the file"),
}


@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_wheel_is_refused_by_name(world, tmp_path, change, message):
    files = change(contents(world.wheel))
    with zipfile.ZipFile(source := tmp_path / NAME, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in files.items() if isinstance(files, dict) else files:
            out.writestr(name, data)
    with refused("integrity.archive", message):
        world.make(source, tmp_path / "out")


def test_a_wheel_is_made_once_and_checked_by_the_lock(world):
    world.lock()
    first = world.patched()
    assert not first.is_new  # already made by locking
    first.path.unlink()
    second = world.patched()
    assert second.is_new
    assert second.requirement == f"up==1.0+sparkforge.1 --hash=sha256:{sha256_file(second.path)}"
    stamp = second.path.stat().st_mtime_ns
    assert not world.patched().is_new
    assert world.patched().path.stat().st_mtime_ns == stamp


def test_a_file_that_is_not_the_locked_one_is_not_kept(world):
    world.lock()
    lock = world.patched().lock
    write_patched({**verify.load_patched(), NAME: lock.model_copy(update={"sha256": "a" * 64})})
    with refused("patch.lock", r"a{64} is locked"):
        world.patched()
    assert [path for path in fetch.cached(lock.file, "a" * 64).parent.iterdir() if path.suffix != ".lock"] == []


def test_a_queue_that_is_not_the_locked_one_is_refused_and_locking_it_raises_the_revision(world):
    with refused("patch.lock", "no entry"):
        world.patched()
    world.lock()
    first = verify.PATH.read_text()
    world.lock()
    assert verify.PATH.read_text() == first
    (patch,) = world.folder.glob("*.patch")
    patch.write_text(patch.read_text().replace("LINE 5", "LINE FIVE"))
    with pytest.raises(PatchError, match=r"not patches/up-1.0"):
        world.patched()
    world.lock()
    assert {lock.revision for lock in verify.load_patched().values()} == {2}
    assert "up-1.0+sparkforge.2.dist-info/METADATA" in contents(world.patched().path)
    patch.write_text(patch.read_text().replace("-line 5", "-line five"))
    with refused("patch.conflict", "does not apply"):
        world.lock()
