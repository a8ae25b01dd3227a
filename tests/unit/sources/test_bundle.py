"""Bundles made, unpacked and attacked; the registry files in them are seeded into the cache."""

import contextlib
import io
import json
import os
import platform
import sys
import tarfile
import zipfile

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from expected import refused
from invoke.exceptions import Exit
from programs import write_files

from sparkforge import pins
from sparkforge.cli import maintain
from sparkforge.core import manifest, paths
from sparkforge.core.errors import IntegrityError, UsageError
from sparkforge.image import sbom, signing, trust
from sparkforge.pins import wheels
from sparkforge.pins.wheels import Pick
from sparkforge.sources import archive, bundle, fetch, offline, trees

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
WHEEL = "some_thing-1-py3-none-any.whl"
TORCH = f"torch-1+cpu-{TAG}-{TAG}-manylinux_2_28_{platform.machine()}.whl"


@pytest.fixture
def picks(kit):
    """The wheels that the lock picks."""
    return [Pick("Some.Thing", WHEEL, kit.seed(WHEEL, b"wheel" * 1000))]


@pytest.fixture
def world(empty_root, monkeypatch, use_pins, kit, picks):
    checkout = ("pins.toml", "locks/tools.txt", "locks/embedded.txt", "patches/up-1/series")
    write_files(empty_root, {path: path for path in checkout})
    sdist = kit.seed("up-1.tar.gz", kit.sdist("up-1", {"CMakeLists.txt": kit.asks}))
    torch = {"kind": "wheel", "package": "torch", "version": "1+cpu", "index": "http://127.0.0.1:9"}
    torch = kit.component({TORCH: kit.seed(TORCH, b"torch")}, **torch)
    table = kit.table({"up": kit.component({"up-1.tar.gz": sdist})}, {"dep": kit.dependency}).model_dump(by_alias=True)
    table["stacks"]["embedded"] = {"summary": "e", "components": {"torch": torch.model_dump(by_alias=True)}}
    table["stacks"]["spark"] = table["stacks"].pop("s")
    table |= {"default": "spark", "devices": {"embedded": "embedded"}}
    table["environments"] = {"embedded": {"lock": "embedded", "wheels": ["embedded/torch"], "size": 1}}
    pinned = pins.Pins.model_validate(table)
    use_pins(pinned)
    monkeypatch.setattr(wheels, "picks", lambda lock, target: picks)
    return pinned


def bring_dep():
    pin = pins.load().stacks["spark"].git["dep"]

    def clone(temporary):
        write_files(temporary, {"src/dep.h": "dep\n"})
        listing = {"src/dep.h": bundle.BundleMember.of("", b"dep\n").sha256}
        archive.write_listing(trees.repository_folder("dep", pin), listing)
        return manifest.Made({"listing": archive.tree_sha256(listing)})

    inputs = {"repository": pin.repository, "commit": pin.commit, "tree": "unknown"}
    manifest.once(trees.repository_folder("dep", pin), "git", inputs, clone)


def index(folder):
    return json.loads((folder / "index.json").read_text())


def test_a_bundle_holds_everything_and_says_what_is_absent(tmp_path, world):
    file = tmp_path / "b.tar"
    write_files(paths.state() / "packs", {"oci-layout": "{}"})
    _, is_new = bundle.make(file, stack="spark")
    bundle.unpack(file, tmp_path / "out")
    members = index(tmp_path / "out")["members"]
    assert is_new
    expected = {"up-1.tar.gz", WHEEL, TORCH, "pins.toml", "tools.txt", "embedded.txt", "series", "oci-layout"}
    assert expected <= {path.split("/")[-1] for path in members}
    assert all((tmp_path / "out" / path).stat().st_size == member["size"] for path, member in members.items())
    page = (tmp_path / "out/simple/some-thing/index.html").read_text()
    assert f'href="../../files/{fetch.sha256_file(next((tmp_path / "out/files").glob("*/some*")))}/' in page
    absent = {entry["name"]: entry["command"] for entry in index(tmp_path / "out")["absent"]}
    assert set(absent) == {"dep", "vocabulary"}
    pin = world.stacks["spark"].git["dep"]
    assert f"fetch -q --depth 1 {pin.repository} {pin.commit}" in absent["dep"]


def test_the_signature_that_trust_toml_demands_is_verified_before_a_bundle_is_unpacked(
    tmp_path, world, trust_file, capsys
):
    keys = {name: Ed25519PrivateKey.generate() for name in ("lab", "other")}
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for name, key in keys.items():
        (tmp_path / name).write_bytes(key.private_bytes(*form))
        (tmp_path / name).chmod(0o600)

    file = tmp_path / "b.tar"

    def unpack(refusal=""):
        with pytest.raises(Exit) if refusal else contextlib.nullcontext():
            maintain.bundle_unpack.body(None, str(file), str(tmp_path / "out"))
        said = capsys.readouterr().err
        assert ("[integrity.signature]" in said, refusal in said) == (bool(refusal), True)
        return said

    maintain.bundle_make.body(None, output=str(file), stack="spark")
    assert "b.tar is unsigned" in unpack()
    public = signing.public_text(keys["lab"])
    trust_file.write_text(f'schema = 1\n[keys.lab]\npublic = """{public}"""\n[images]\ndemand = ["sbom"]\n')
    trust_file.chmod(0o600)
    unpack("it has none")
    signing.sign_bundle(file, "0" * 64, "{}", tmp_path / "lab")
    unpack("another digest")
    signing.sign_bundle(file, fetch.sha256_file(file), "{}", tmp_path / "other")
    unpack("no accepted key")
    signing.signature_path(file).write_bytes(b"[" * 9999)
    unpack("nested deeper")
    maintain.bundle_make.body(None, output=str(file), stack="spark", key=str(tmp_path / "lab"))
    assert "b.tar is signed by lab" in unpack()
    text = (tmp_path / "b.tar.cdx.json").read_text()
    _, statement = signing.read_statement(trust.signatures(file)[0], {"lab": keys["lab"].public_key()})
    assert statement["predicate"] == json.loads(text)


def test_a_bill_lists_every_member_with_its_hash_and_packages_with_their_licence(tmp_path, kit, world, picks):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        made.writestr("some_thing-1.dist-info/METADATA", "Name: some-thing\nLicense-Expression: MIT\n")
    picks[:] = [Pick("some-thing", WHEEL, kit.seed(WHEEL, content.getvalue()))]
    bundle.make(tmp_path / "b.tar", stack="spark")
    text = sbom.of_bundle(tmp_path / "b.tar", "spark", world)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bundle.unpack(tmp_path / "b.tar", tmp_path / "out")
    components = json.loads(text)["components"]
    hashes = sorted(entry["hashes"][0]["content"] for entry in components)
    assert hashes == sorted(member["sha256"] for member in index(tmp_path / "out")["members"].values())
    wheel = next(entry for entry in components if entry["name"] == "some-thing")
    assert wheel["purl"] == f"pkg:pypi/some-thing@1?file_name={WHEEL}"
    assert wheel["licenses"] == [{"license": {"id": "MIT"}}]
    (pinned,) = next(entry for entry in components if entry["name"] == "up")["licenses"]
    assert world.component("spark", "up").licence in json.dumps(pinned)


def test_the_same_inputs_give_the_same_bytes_and_a_second_run_does_nothing(tmp_path, world):
    bundle.make(tmp_path / "b.tar", stack="spark")
    first = (tmp_path / "b.tar").read_bytes()
    assert not bundle.make(tmp_path / "b.tar", stack="spark")[1]
    for file in paths.cache().rglob("*"):
        os.utime(file, (1, 1))
    bundle.make(tmp_path / "other.tar", stack="spark")
    assert (tmp_path / "other.tar").read_bytes() == first
    with tarfile.open(tmp_path / "b.tar") as tar:
        infos = tar.getmembers()
    assert [member.name for member in infos] == ["index.json", *sorted(member.name for member in infos[1:])]
    assert {(info.mtime, info.uid, info.gid, info.uname, info.mode) for info in infos} == {(0, 0, 0, "", 0o644)}
    (paths.ROOT / "patches/up-1/0001-a.patch").write_text("new")
    assert bundle.make(tmp_path / "b.tar", stack="spark")[1]


def test_offline_a_bundle_gives_back_sources_and_repositories(tmp_path, world, monkeypatch):
    for name in (offline.VARIABLE, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    bring_dep()
    file = tmp_path / "b.tar"
    bundle.make(file, stack="spark")
    bundle.unpack(file, tmp_path / "out")
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "spark-state"))
    monkeypatch.setenv("SPARKFORGE_CACHE", str(tmp_path / "spark-cache"))
    offline.use(tmp_path / "out")
    sources = trees.fetch_sources("spark")
    assert [(source.name, source.state) for source in sources] == [("up", "made"), ("dep", "made")]
    assert (sources[1].path / "src/dep.h").read_text() == "dep\n"
    assert sources[1].variable == "DEP_SRC_DIR"
    assert [source.state for source in trees.fetch_sources("spark")] == ["unchanged", "unchanged"]


def test_a_file_that_is_no_bundle_is_not_overwritten_and_another_format_machine_or_part_is_refused(tmp_path, world):
    file = tmp_path / "b.tar"
    bundle.make(file, stack="spark")  # its manifest stays when the file is replaced
    file.write_text("dear")
    with pytest.raises(UsageError, match="not a bundle"):
        bundle.make(file, stack="spark")
    assert file.read_text() == "dear"
    for name, target in (
        ("b.zip", {}), ("b.tar", {"machine": "arm64"}), ("b.tar", {"more": ["nope"]}), ("b.tar", {"more": ["../pins"]}),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            bundle.make_and_report(tmp_path / name, stack="spark", **target)


def test_a_damaged_file_in_the_cache_does_not_get_into_a_bundle(tmp_path, world):
    file = next(paths.cache().rglob(TORCH))
    entry = bundle.BundleMember.of("files/x", file)
    file.write_bytes(b"t0rch")
    with refused("integrity.hash", "cannot be packed"):
        bundle.write(tmp_path / "b.tar", [entry], [], {})


def rewrite(source, target, change):
    with tarfile.open(source) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar.getmembers()]
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
DEEP = "a/" * 1250 + "f"
ATTACKS = {
    "unlisted": (lambda m: [*m, (odd("extra"), b"x")], "'extra' is not in its index"),
    "twice": (lambda m: [*m, m[-1]], "is in it twice"),
    "index not first": (lambda m: [m[1], m[0], *m[2:]], "begins with"),
    "empty": (lambda m: [], "empty"),
    "a member missing": (lambda m: m[:-1], "truncated: simple"),
    "wrong bytes": (lambda m: [*m[:-1], (m[-1][0], m[-1][1][:-1] + b"X")], "does not match the index"),
    "longer": (lambda m: [*m[:-1], (m[-1][0], m[-1][1] + b"X")], "does not match the index"),
    "traversal": (lambda m: [*m, (odd("../x"), b"x")], "'../x' is absolute, points outside"),
    "traversal in the index": (lambda m: [*edit_index(m, **{"../x": FINE}), (odd("../x"), b"x")],
                               r"its index\.json has an entry that is not allowed: '\.\./x'"),
    "a file that is a folder": (lambda m: edit_index(m, **{"pins.toml/x": FINE}), "not allowed: 'pins.toml/x'"),
    "the index in the index": (lambda m: edit_index(m, **{"index.json": FINE}), "not allowed: 'index.json'"),
    "a negative size": (lambda m: edit_index(m, x={"sha256": "0", "size": -1}), "not allowed: 'x'"),
    "another schema": (lambda m: [(m[0][0], b'{"schema": 2, "members": {}}'), *m[1:]], "another schema"),
    "symbolic link": (lambda m: [*m, (odd("pins.toml", tarfile.SYMTYPE), b"")], "symbolic link"),
    "folder": (lambda m: [*m, (odd("files", tarfile.DIRTYPE), b"")], "not in its index"),
    "an endless size": (lambda m: [(m[0][0], b'{"schema": 1, "members": {"x": {"sha256": "0", "size": 1e999}}}')],
                        "cannot be read by this Sparkforge"),
    "deeper than any of ours": (lambda m: [*edit_index(m, **{DEEP: FINE}), (odd(DEEP), b"x")], "not allowed: 'a/a/"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ATTACKS.values(), ids=ATTACKS)
def test_an_altered_bundle_is_refused_by_name_and_nothing_is_left(tmp_path, world, change, message):
    bundle.make(tmp_path / "b.tar", stack="spark")
    bad = rewrite(tmp_path / "b.tar", tmp_path / "bad.tar", change)
    with pytest.raises(IntegrityError, match=message):
        bundle.unpack(bad, tmp_path / "room/out")
    assert [path.name for path in (tmp_path / "room").iterdir()] == [".out.lock"]


@pytest.mark.parametrize(("kept", "why"), [(0, "it is empty"), (-1, "it is truncated: {} is missing"),
                                           (-2, "it is truncated: {}, {} are missing")])  # fmt: skip
def test_a_bundle_without_all_of_its_members_is_refused_with_their_names(tmp_path, world, kept, why):
    bundle.make(tmp_path / "b.tar", stack="spark")
    with tarfile.open(tmp_path / "b.tar") as tar:
        names = tar.getnames()
    bad = rewrite(tmp_path / "b.tar", tmp_path / "bad.tar", lambda members: members[:kept])
    with pytest.raises(IntegrityError) as caught:
        bundle.unpack(bad, tmp_path / "out")
    assert caught.value.why == f"{why.format(*names[kept:])}; nothing of it was kept"


def test_the_hash_of_the_whole_bundle_is_checked_or_its_lack_is_told(tmp_path, world, capfd):
    file, out = tmp_path / "b.tar", tmp_path / "out"
    sha256 = bundle.make(file, stack="spark")[0].outputs["b.tar"]
    with pytest.raises(IntegrityError, match="not the bundle that was made"):
        bundle.unpack(file, out, sha256="0" * 64)
    assert bundle.unpack(file, out, sha256=sha256.upper())[1]
    assert "warning" not in capfd.readouterr().err
    assert not bundle.unpack(file, out)[1]
    output = capfd.readouterr().err
    assert "warning: without --sha256" in output
    assert sha256 in "".join(output.split())


def test_a_folder_with_anything_else_is_never_replaced(tmp_path, world, kit):
    folder = write_files(tmp_path / "s", {"thesis": "years of work"})
    (tmp_path / "junk.tar").write_text("junk")
    bundle.make(tmp_path / "b.tar", stack="spark")
    for file, message in (("junk.tar", "it exists"), ("b.tar", "it exists"), ("c.tar", "there is no such file")):
        with pytest.raises(UsageError, match=message) as caught:
            bundle.unpack(tmp_path / file, folder)
        assert caught.value.fix.startswith(f"mv {folder} {folder}.old") or file == "c.tar"
    assert kit.snapshot(folder) == {"thesis": b"years of work"}
    out = tmp_path / "room/out"
    bundle.unpack(tmp_path / "b.tar", out)
    before = kit.snapshot(out)
    (paths.ROOT / "patches/up-1/0001-a.patch").write_text("new")
    bundle.make(tmp_path / "newer.tar", stack="spark")
    with pytest.raises(UsageError, match=r"was not unpacked from newer\.tar"):
        bundle.unpack(tmp_path / "newer.tar", out)
    assert kit.snapshot(out) == before
    assert not bundle.unpack(tmp_path / "b.tar", out)[1]
