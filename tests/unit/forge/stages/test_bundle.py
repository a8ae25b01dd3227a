"""Bundles made, unpacked and attacked; the registry files in them are seeded into the cache."""

import io
import json
import os
import platform
import random
import sys
import tarfile

import pytest

from forge import archive, bundle, fetch, manifest, offline, pins, sources, wheels
from forge.wheels import Pick
from sparkforge import paths
from sparkforge.errors import ArchiveError, HashMismatchError, UsageError

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
TORCH = f"torch-1+cpu-{TAG}-{TAG}-manylinux_2_28_{platform.machine()}.whl"
COMMIT = "d" * 40
DEP = {
    "of": "up",
    "asked_in": "CMakeLists.txt",
    "dependency": "dep",
    "repository": "https://e.invalid/dep.git",
    "tag": COMMIT,
    "commit": COMMIT,
    "tree": "unknown",
    "licence": "MIT",
    "needed": True,
    "why": "wanted",
    "src_dir": "DEP_SRC_DIR",
}
ASKS = (
    f"if(NOT DEP_SRC_DIR)\nFetchContent_Declare(dep GIT_REPOSITORY https://e.invalid/dep.git GIT_TAG {COMMIT})\nendif()"
)


@pytest.fixture
def world(tmp_path, monkeypatch, kit):
    """A checkout with one sdist, one wheel, torch, a patch, and a repository that is needed but not there."""
    for path in ("pins.toml", "locks/tools.txt", "locks/embedded.txt", "patches/up-1/series"):
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).write_text(path)
    monkeypatch.setattr(paths, "ROOT", tmp_path / "root")
    monkeypatch.setattr(bundle, "lock_path", lambda name: tmp_path / f"root/locks/{name}.txt")
    sdist = kit.seed("up-1.tar.gz", kit.sdist("up-1", {"CMakeLists.txt": ASKS}))
    torch = kit.component({TORCH: kit.seed(TORCH, b"torch")}, kind="wheel", package="torch", version="1+cpu")
    wheel = Pick(
        "Some.Thing", "some_thing-1-py3-none-any.whl", kit.seed("some_thing-1-py3-none-any.whl", b"wheel" * 1000)
    )
    table = kit.table({"up": kit.component({"up-1.tar.gz": sdist})}, {"dep": DEP}).model_dump(by_alias=True)
    table["stacks"]["embedded"] = {"summary": "e", "components": {"torch": torch.model_dump()}}
    table["stacks"]["spark"] = table["stacks"].pop("s")
    made = pins.Pins.model_validate(table)
    monkeypatch.setattr(pins, "load", lambda: made)
    monkeypatch.setattr(wheels, "picks", lambda lock, target: [wheel])
    return made


def bring_dep():
    """Bring the repository of `world` as gitsource would."""
    pin = pins.load().stacks["spark"].git["dep"]

    def clone(temporary):
        (temporary / "src").mkdir(parents=True)
        (temporary / "src/dep.h").write_text("dep\n")
        listing = {"src/dep.h": bundle.Entry.of("", b"dep\n").sha256}
        archive.write_listing(sources.git_place("dep", pin), listing)
        return manifest.Made({"listing": archive.tree_sha256(listing)})

    manifest.once(
        sources.git_place("dep", pin), "git", {"repository": pin.repository, "commit": COMMIT, "tree": "unknown"}, clone
    )


def index(folder):
    return json.loads((folder / "index.json").read_text())


def test_a_bundle_holds_everything_and_says_what_is_absent(tmp_path, world):
    file = tmp_path / "b.tar"
    _, made = bundle.make(file)
    bundle.unpack(file, tmp_path / "out")
    members = index(tmp_path / "out")["members"]
    names = {path.split("/")[-1] for path in members}
    assert made
    assert {
        "up-1.tar.gz",
        "some_thing-1-py3-none-any.whl",
        TORCH,
        "pins.toml",
        "tools.txt",
        "embedded.txt",
        "series",
    } <= names
    assert {path: (tmp_path / "out" / path).stat().st_size for path in members} == {
        p: m["size"] for p, m in members.items()
    }
    page = (tmp_path / "out/simple/some-thing/index.html").read_text()
    assert f'href="../../files/{fetch.sha256_file(next((tmp_path / "out/files").glob("*/some*")))}/' in page
    absent = {one["name"]: one["command"] for one in index(tmp_path / "out")["absent"]}
    assert set(absent) == {"dep", "vocabulary"}
    assert f"fetch -q --depth 1 https://e.invalid/dep.git {COMMIT}" in absent["dep"]


def test_the_same_inputs_give_the_same_bytes_and_a_second_run_does_nothing(tmp_path, world):
    bundle.make(tmp_path / "b.tar")
    first = (tmp_path / "b.tar").read_bytes()
    assert not bundle.make(tmp_path / "b.tar")[1]
    for file in paths.cache().rglob("*"):
        os.utime(file, (1, 1))
    bundle.make(tmp_path / "other.tar")
    assert (tmp_path / "other.tar").read_bytes() == first
    with tarfile.open(tmp_path / "b.tar") as tar:
        infos = tar.getmembers()
    assert [one.name for one in infos] == ["index.json", *sorted(one.name for one in infos[1:])]
    assert {(one.mtime, one.uid, one.gid, one.uname, one.mode) for one in infos} == {(0, 0, 0, "", 0o644)}
    (paths.ROOT / "patches/up-1/0001-a.patch").write_text("new")
    assert bundle.make(tmp_path / "b.tar")[1]


def test_offline_a_bundle_gives_back_sources_and_repositories(tmp_path, world, monkeypatch):
    for name in (offline.VARIABLE, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    bring_dep()
    file = tmp_path / "b.tar"
    bundle.make(file)
    bundle.unpack(file, tmp_path / "out")
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "spark-state"))
    monkeypatch.setenv("SPARKFORGE_CACHE", str(tmp_path / "spark-cache"))
    offline.use(tmp_path / "out")
    found = sources.bring("spark")
    assert [(one.name, one.state) for one in found] == [("up", "made"), ("dep", "made")]
    assert (found[1].place / "src/dep.h").read_text() == "dep\n"
    assert found[1].variable == "DEP_SRC_DIR"
    assert [one.state for one in sources.bring("spark")] == ["unchanged", "unchanged"]


def test_a_file_that_is_no_bundle_is_not_overwritten_and_a_folder_not_removed(tmp_path, world):
    (tmp_path / "letter.tar").write_text("dear")
    with pytest.raises(UsageError, match="no bundle"):
        bundle.make(tmp_path / "letter.tar")
    with pytest.raises(UsageError, match=r".tar"):
        bundle.make(tmp_path / "b.zip")
    bundle.make(tmp_path / "b.tar")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter").write_text("dear")
    with pytest.raises(UsageError, match="holds no bundle"):
        bundle.unpack(tmp_path / "b.tar", tmp_path / "home")
    with pytest.raises(UsageError, match="no such file"):
        bundle.unpack(tmp_path / "c.tar", tmp_path / "out")
    assert (tmp_path / "home/letter").read_text() == (tmp_path / "letter.tar").read_text() == "dear"


def test_a_damaged_file_in_the_cache_does_not_get_into_a_bundle(tmp_path, world):
    file = next(paths.cache().rglob(TORCH))
    entry = bundle.Entry.of("files/x", file)
    file.write_bytes(b"t0rch")
    with pytest.raises(HashMismatchError, match="cannot be packed"):
        bundle.write(tmp_path / "b.tar", [entry], [], {})


def rewrite(source, target, change):
    """Copy a bundle's members as (TarInfo, bytes) through `change`."""
    with tarfile.open(source) as tar:
        members = [(one, tar.extractfile(one).read()) for one in tar.getmembers()]
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in change(members):
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return target


def odd(name, kind=tarfile.REGTYPE, link="pins.toml"):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def edit_index(members, **changes):
    value = json.loads(members[0][1])
    value["members"] |= changes
    return [(members[0][0], json.dumps(value).encode()), *members[1:]]


FINE = {"sha256": "0" * 64, "size": 1}
ATTACKS = {
    "unlisted": (lambda m: [*m, (odd("extra"), b"x")], "'extra' is not in its index"),
    "twice": (lambda m: [*m, m[-1]], "stands in it twice"),
    "index not first": (lambda m: [m[1], m[0], *m[2:]], "begins with"),
    "no index": (lambda m: m[1:], "begins with"),
    "empty": (lambda m: [], "empty"),
    "a member missing": (lambda m: m[:-1], "truncated: simple"),
    "wrong bytes": (lambda m: [*m[:-1], (m[-1][0], m[-1][1][:-1] + b"X")], "not what the index says"),
    "longer": (lambda m: [*m[:-1], (m[-1][0], m[-1][1] + b"X")], "not what the index says"),
    "shorter": (lambda m: [*m[:-1], (m[-1][0], m[-1][1][:-1])], "not what the index says"),
    "traversal": (lambda m: [*m, (odd("../x"), b"x")], "'../x' is absolute, leads out"),
    "absolute": (lambda m: [*m, (odd("/x"), b"x")], "'/x' is absolute"),
    "traversal in the index": (lambda m: [*edit_index(m, **{"../x": FINE}), (odd("../x"), b"x")], "lists '../x'"),
    "a file that is a folder": (lambda m: edit_index(m, **{"pins.toml/x": FINE}), "lists 'pins.toml/x'"),
    "the index in the index": (lambda m: edit_index(m, **{"index.json": FINE}), "lists 'index.json'"),
    "a negative size": (lambda m: edit_index(m, x={"sha256": "0", "size": -1}), "lists 'x'"),
    "no size": (lambda m: edit_index(m, x={}), "not one that this Sparkforge reads"),
    "not JSON": (lambda m: [(m[0][0], b"{"), *m[1:]], "not one that this Sparkforge reads"),
    "another schema": (lambda m: [(m[0][0], b'{"schema": 2, "members": {}}'), *m[1:]], "another schema"),
    "symbolic link": (lambda m: [*m, (odd("pins.toml", tarfile.SYMTYPE), b"")], "symbolic link"),
    "hard link": (lambda m: [*m, (odd("pins.toml", tarfile.LNKTYPE), b"")], "hard link"),
    "device": (lambda m: [*m, (odd("pins.toml", tarfile.CHRTYPE), b"")], "character device"),
    "fifo": (lambda m: [*m, (odd("pins.toml", tarfile.FIFOTYPE), b"")], "fifo"),
    "folder": (lambda m: [*m, (odd("files", tarfile.DIRTYPE), b"")], "not in its index"),
    "index a link": (lambda m: [(odd("index.json", tarfile.SYMTYPE), b""), *m], "symbolic link"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_altered_bundle_is_refused_by_name_and_nothing_is_left(tmp_path, world, name):
    change, words = ATTACKS[name]
    bundle.make(tmp_path / "b.tar")
    bad = rewrite(tmp_path / "b.tar", tmp_path / "bad.tar", change)
    with pytest.raises((ArchiveError, HashMismatchError), match=words):
        bundle.unpack(bad, tmp_path / "room/out")
    assert [path.name for path in (tmp_path / "room").iterdir()] == [".out.lock"]


def test_a_bundle_cut_or_flipped_anywhere_is_refused(tmp_path, world):
    bundle.make(tmp_path / "b.tar")
    whole = (tmp_path / "b.tar").read_bytes()
    end = len(whole.rstrip(b"\0")) + 1024  # one block of the end mark may go: nothing of the content is lost
    dice = random.Random(3)  # noqa: S311 - the same places each time
    for length in [*range(0, end - 512, 512 * 7), *dice.sample(range(end - 1024), 60)]:
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        with pytest.raises((ArchiveError, HashMismatchError)):
            bundle.unpack(tmp_path / "cut.tar", tmp_path / "room/out")
    with tarfile.open(tmp_path / "b.tar") as tar:
        spans = [range(one.offset_data, one.offset_data + one.size) for one in tar.getmembers()]
    for place in dice.sample([byte for span in spans[1:] for byte in span], 60):
        (tmp_path / "cut.tar").write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(HashMismatchError, match="not what the index says"):
            bundle.unpack(tmp_path / "cut.tar", tmp_path / "room/out")
    assert [path.name for path in (tmp_path / "room").iterdir()] == [".out.lock"]


def test_the_hash_of_the_whole_bundle_can_be_asked_for(tmp_path, world):
    made, _ = bundle.make(tmp_path / "b.tar")
    with pytest.raises(HashMismatchError, match="not the bundle that was made"):
        bundle.unpack(tmp_path / "b.tar", tmp_path / "out", sha256="0" * 64)
    assert bundle.unpack(tmp_path / "b.tar", tmp_path / "out", sha256=made.outputs["b.tar"])[1]
    assert not bundle.unpack(tmp_path / "b.tar", tmp_path / "out")[1]


def test_a_kill_at_any_step_of_packing_or_unpacking_leaves_nothing_half_trusted(tmp_path, world, kit):
    bring_dep()
    room = tmp_path / "room"
    file, out = room / "b.tar", room / "out"
    bundle.make(tmp_path / "good.tar")

    def pack():
        bundle.make(file)

    def unpack():
        bundle.unpack(tmp_path / "good.tar", out)

    def check_pack():
        assert manifest.load(file) is None or file.read_bytes() == (tmp_path / "good.tar").read_bytes()
        pack()
        assert file.read_bytes() == (tmp_path / "good.tar").read_bytes()
        assert sorted(path.name for path in room.iterdir()) == [".b.tar.lock", "b.tar", "b.tar.manifest.json"]
        manifest.remove(room)

    def check_unpack():
        unpack()
        wanted = {path: one["sha256"] for path, one in index(out)["members"].items()}
        assert {path: fetch.sha256_file(out / path) for path in wanted} == wanted
        assert sorted(path.name for path in room.iterdir()) == [".out.lock", "out", "out.manifest.json"]
        manifest.remove(room)

    assert kit.kill_at_each_step(pack, check_pack) >= 8
    assert kit.kill_at_each_step(unpack, check_unpack) >= 20


@pytest.mark.parametrize("words", [{"machine": "arm64"}, {"python": "2.7"}])
def test_a_machine_or_python_that_nothing_is_pinned_for_is_refused(tmp_path, words):
    with pytest.raises(UsageError):
        bundle.show(tmp_path / "b.tar", **words)
