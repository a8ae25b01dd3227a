"""The chain from a file back to a pin, on a source tree and on a site-packages, and each link broken in turn."""

import hashlib
import json
import shutil
import zipfile

import pytest

from sparkforge.core import manifest
from sparkforge.core.errors import IntegrityError, PatchError
from sparkforge.patching import provenance, wheels
from sparkforge.patching.series import Queue
from sparkforge.pins import verify
from sparkforge.sources import archive, fetch, trees

FILES = {"CMakeLists.txt": "project(up)\n", "pkg/a.py": "x = 1\n", "pkg/b.py": "y = 2\n"}
PATCH = """\
Description: Change x
 for a test
Origin: vendor, Sparkforge
Bug: https://example.org/1
Forwarded: no
Last-Update: 2026-11-21
Drop-when: lacks pkg/a.py x = 1
---
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1 +1 @@
-x = 1
+x = 3
--- /dev/null
+++ b/pkg/new.py
@@ -0,0 +1 @@
+z = 1
"""


OURS = "up_cpu-1+sparkforge.1.dist-info"


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def patches(tmp_path):
    folder = tmp_path / "patches/up-1"
    folder.mkdir(parents=True)
    (folder / "0001-change-x.patch").write_text(PATCH)
    (folder / "series").write_text("0001-change-x.patch\n")
    return folder


@pytest.fixture
def world(kit):
    """A source tree; returns it with a function that asks for the provenance of one of its files."""
    pins = kit.upstream(FILES)
    trees.fetch_sources("s", table=pins)
    tree = kit.install_pins(pins)
    return tree, lambda path: provenance.provenance(tree / path, table=pins)


def test_a_file_of_a_source_tree_is_followed_to_its_pin(world):
    tree, ask = world
    chain = ask("pkg/a.py")
    assert [link.sha256 for link in chain] == [sha("x = 1\n")] * 2 + [manifest.load(tree).inputs["up-1.tar.gz"]]
    assert chain[1].subject == "pkg/a.py as upstream has it"
    assert "s/up: up 1" in chain[-1].known
    assert all(link.proven for link in [*chain, *ask("pkg/b.py")])
    assert ask(f"pkg/../../{tree.name}/pkg/a.py") == chain


TREE_BREAKS = {
    "no such file": (lambda tree: None, "pkg/absent.py", "no such file", IntegrityError),
    "made later": (lambda p: (p / "later").write_text("x"), "later", "holds no such file", IntegrityError),
    "a link": (lambda p: (p / "pkg/l.py").symlink_to("/etc/hostname"), "pkg/l.py", "symbolic link", IntegrityError),
    "edited": (lambda p: (p / "pkg/b.py").write_text("no\n"), "pkg/b.py", "upstream's bytes", PatchError),
    "no listing": (lambda p: archive.listing_path(p).unlink(), "pkg/b.py", "listing is gone", IntegrityError),
    "another listing": (
        lambda p: archive.listing_path(p).write_text(f"{sha('no')}  pkg/b.py\n"),
        "pkg/b.py", "not the one", IntegrityError,
    ),
    "a damaged listing": (
        lambda p: archive.listing_path(p).write_bytes(b"\xff\xff"), "pkg/b.py", "listing is gone", IntegrityError,
    ),
    "no manifest": (lambda p: manifest.beside(p).unlink(), "pkg/b.py", "no folder above it", IntegrityError),
    "forged records": (lambda p: forge(p, "pkg/a.py", "forged = 1\n"), "pkg/a.py", "records beside it", PatchError),
}  # fmt: skip


@pytest.mark.parametrize("name", TREE_BREAKS)
def test_a_link_that_does_not_hold_is_an_error(world, name):
    spoil, path, arguments, error = TREE_BREAKS[name]
    tree, ask = world
    spoil(tree)
    with pytest.raises(error, match=arguments):
        ask(path)


def test_an_artifact_that_is_no_longer_pinned_is_an_error(world, kit, patches):
    tree, _ = world
    other = kit.table({"up": kit.component({"up-1.tar.gz": "0" * 64})})
    with pytest.raises(
        IntegrityError, match=r"up-1.tar.gz is not pinned", check=lambda error: error.code == "integrity.provenance"
    ):
        provenance.provenance(tree / "pkg/b.py", patches=patches.parent, table=other)


def test_a_file_of_a_repository_is_followed_to_its_commit(tmp_path, kit):
    pin = {
        "of": "up",
        "asked_in": "f",
        "dependency": "dep",
        "repository": "https://e.invalid/dep.git",
        "tag": "d" * 40,
        "commit": "d" * 40,
        "tree": "unknown",
        "size": "unknown",
        "licence": "MIT",
        "needed": True,
        "why": "wanted",
    }
    pins = kit.table({"up": kit.component({"up-1.tar.gz": "0" * 64})}, {"dep": pin})
    path = tmp_path / "dep"

    def make(temporary):
        temporary.mkdir()
        (temporary / "dep.h").write_text("dep\n")
        archive.write_listing(path, {"dep.h": sha("dep\n")})
        return manifest.Made({"listing": archive.tree_sha256({"dep.h": sha("dep\n")})})

    manifest.once(path, "git", {"repository": pin["repository"], "commit": pin["commit"], "tree": "unknown"}, make)
    chain = provenance.provenance(path / "dep.h", table=pins)
    assert chain[-1].subject == f"https://e.invalid/dep.git at {'d' * 40}"
    assert not any(link.proven for link in chain)  # pins.toml has a commit, and no hash of the files
    with pytest.raises(IntegrityError, match="not pinned"):
        provenance.provenance(path / "dep.h", table=kit.table({"up": kit.component({"up-1.tar.gz": "0" * 64})}))


@pytest.fixture
def installed(tmp_path, kit, patches, patched_wheel):
    """A site-packages with up-cpu 1 from a patched wheel, and stranger 2; returns it with a function that asks."""
    upstream = patched_wheel.build(tmp_path, {path: text.encode() for path, text in FILES.items()}, "up_cpu", "1")
    sha256 = kit.seed(upstream.name, upstream.read_bytes())
    component = kit.component({upstream.name: sha256}, kind="wheel", package="up-cpu", patches="up-1")
    wheel = tmp_path / "made.whl"
    with wheel.open("wb") as output:
        wheels.make(upstream, component, Queue.load(patches), 1, output)
    root = tmp_path / "lib/site-packages"
    for file in (wheel, patched_wheel.build(tmp_path, {"other/c.py": b"c\n"}, "stranger", "2")):
        with zipfile.ZipFile(file) as opened:
            opened.extractall(root)
    pins = kit.table({"up": component})
    return root, lambda path: provenance.provenance(root / path, patches=patches.parent, table=pins)


def test_an_installed_file_is_followed_through_its_wheel_and_its_patches(installed):
    root, ask = installed
    origin = verify.read_origin(root / "up_cpu-1+sparkforge.1.dist-info")
    assert [link.sha256 for link in ask("pkg/a.py")] == [sha("x = 3\n"), sha(PATCH), sha("x = 1\n"), origin.sha256]
    text = "\n".join(map(str, ask("pkg/a.py")))
    for expected_text in (
        "patched by up-1/0001-change-x",
        "Change x · vendor",
        "patches/upstream.json",
        "s/up: up-cpu 1",
    ):
        assert expected_text in text
    assert [link.sha256 for link in ask("pkg/b.py")] == [sha("y = 2\n")] * 2 + [origin.sha256]
    assert "up_cpu-1+sparkforge.1.dist-info/RECORD" in ask("pkg/b.py")[1].known
    new = ask("pkg/new.py")
    assert [link.sha256 for link in new] == [sha("z = 1\n"), sha(PATCH), None]
    assert "does not exist upstream" in new[-1].subject
    assert all(link.proven for path in ("pkg/a.py", "pkg/b.py", "pkg/new.py") for link in ask(path))


INSTALLED_BREAKS = {
    "a patched file edited": (lambda r, q: (r / "pkg/a.py").write_text("x = 4\n"), "pkg/a.py", "bytes are", PatchError),
    "another file edited": (lambda r, q: (r / "pkg/b.py").write_text("no\n"), "pkg/b.py", "bytes are", PatchError),
    "in no RECORD": (lambda r, q: (r / "l.py").write_text("no\n"), "l.py", "holds no such file", IntegrityError),
    "not pinned": (lambda r, q: None, "other/c.py", "stranger-2 is not pinned", IntegrityError),
    "written by us": (lambda r, q: None, f"{OURS}/METADATA", "when the wheel was patched", IntegrityError),
    "another patch": (
        lambda r, q: (q / "0001-change-x.patch").write_text(PATCH.replace("for a", "in a")),
        "pkg/a.py", "0001-change-x", IntegrityError,
    ),
    "no patch": (
        lambda r, q: (q / "0001-change-x.patch").unlink(), "pkg/a.py", "not there: 0001-change-x.patch", PatchError,
    ),
    "a damaged upstream.json": (
        lambda r, q: (r / OURS / "patches/upstream.json").write_text("{"),
        "pkg/a.py", "cannot be read", IntegrityError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INSTALLED_BREAKS)
def test_a_link_of_an_installed_file_that_does_not_hold_is_an_error(installed, patches, name):
    spoil, path, arguments, error = INSTALLED_BREAKS[name]
    root, ask = installed
    spoil(root, patches)
    with pytest.raises(error, match=arguments):
        ask(path)


RECORDS = [b"\n\npkg/b.py\n", b"pkg/b.py,sha256=!!!,1\n", b"\xff\n", b'"' + b"x" * 200_000, b"a,\0\n"]


@pytest.mark.parametrize("text", RECORDS)
def test_a_damaged_record_of_a_wheel_is_no_traceback(installed, text):
    root, ask = installed
    (root / OURS / "RECORD").write_bytes(text)
    with pytest.raises((IntegrityError, PatchError)):
        ask("pkg/b.py")


def forge(tree, path, text):
    """Change a file of a source tree, and every record beside it so that they agree with each other."""
    (tree / path).write_text(text)
    listing = archive.read_listing(tree) | {path: sha(text)}
    archive.write_listing(tree, listing)
    document = json.loads(manifest.beside(tree).read_text())
    document["outputs"]["listing"] = archive.tree_sha256(listing)
    manifest.beside(tree).write_text(json.dumps(document))


def forge_installed(root, path, text, encoded):
    """Change an installed file, and the RECORD and upstream.json beside it so that they agree with each other."""
    record, listing = root / OURS / "RECORD", root / OURS / "patches/upstream.json"
    old, size = encoded((root / path).read_bytes()), (root / path).stat().st_size
    lines = record.read_text().replace(f"{old},{size}", f"{encoded(text.encode())},{len(text)}")
    record.write_text(lines)
    document = json.loads(listing.read_text())
    if path in document["files"]:
        document["files"][path]["after"] = sha(text)
    listing.write_text(json.dumps(document))
    (root / path).write_text(text)


@pytest.mark.parametrize("path", ["pkg/a.py", "pkg/b.py", "pkg/new.py"])
def test_a_forged_installed_file_is_refused_where_the_pinned_wheel_is_held(installed, patched_wheel, path):
    root, ask = installed
    forge_installed(root, path, "forged = 1\n", patched_wheel.encoded)
    with pytest.raises(PatchError, check=lambda error: error.code == "patch.modified"):
        ask(path)


@pytest.mark.parametrize("cached", [None, b"another"])
def test_without_the_pinned_archive_a_chain_is_only_claimed(world, monkeypatch, capsys, cached):
    tree, ask = world
    file = fetch.cached("up-1.tar.gz", manifest.load(tree).inputs["up-1.tar.gz"])
    file.write_bytes(cached) if cached else shutil.rmtree(file.parent)
    forge(tree, "pkg/a.py", "forged = 1\n")
    chain = ask("pkg/a.py")
    assert not any(link.proven for link in chain)
    monkeypatch.setattr(provenance, "provenance", lambda _: chain)
    with pytest.raises(IntegrityError, match="claimed, not proven"):
        provenance.print_provenance(tree / "pkg/a.py")
    assert "proven by" not in capsys.readouterr().out


@pytest.mark.parametrize("path", ["pkg/a.py", "pkg/b.py"])
def test_without_the_pinned_wheel_an_installed_file_is_only_claimed(installed, patched_wheel, path):
    root, ask = installed
    wheel = verify.read_origin(root / OURS)
    shutil.rmtree(fetch.cached(wheel.filename, wheel.sha256).parent)
    forge_installed(root, path, "forged = 1\n", patched_wheel.encoded)
    assert not any(link.proven for link in ask(path))
