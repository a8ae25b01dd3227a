"""The chain from a file back to a pin, on a source tree and on a site-packages, and each link broken in turn."""

import base64
import hashlib
import json
import shutil

import pytest

from forge import archive, manifest, patch, provenance, sources
from forge.patch import Queue
from sparkforge.errors import ProvenanceError, TreeModifiedError

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
def world(kit, patches):
    """A patched source tree; returns it with a function that asks for the provenance of one of its files."""
    pins = kit.upstream(FILES)
    sources.bring("s", table=pins)
    place = kit.place(pins)
    patch.apply(place, Queue.load(patches))
    return place, lambda path: provenance.provenance(place / path, patches=patches.parent, table=pins)


def test_a_patched_file_is_followed_to_its_pin(world):
    place, ask = world
    chain = ask("pkg/a.py")
    assert [link.sha256 for link in chain] == [
        sha("x = 3\n"),
        sha(PATCH),
        sha("x = 1\n"),
        manifest.load(place).inputs["up-1.tar.gz"],
    ]
    told = "\n".join(map(str, chain))
    for words in (
        "pkg/a.py",
        "patched by up-1/0001-change-x.patch",
        "Change x · vendor",
        "as upstream has it",
        "up-1.tar.gz",
        "s/up: up 1",
    ):
        assert words in told


def test_an_unpatched_file_and_one_that_only_a_patch_makes(world):
    _, ask = world
    assert [link.sha256 for link in ask("pkg/b.py")][:2] == [sha("y = 2\n")] * 2
    made = ask("pkg/new.py")
    assert [link.sha256 for link in made] == [sha("z = 1\n"), sha(PATCH), None]
    assert "does not exist upstream" in made[-1].what


BREAKS = {
    "no such file": (lambda place, queue: None, "pkg/absent.py", "no such file", ProvenanceError),
    "made later": (lambda p, q: (p / "later").write_text("x"), "later", "holds no such file", ProvenanceError),
    "a patched file edited": (
        lambda p, q: (p / "pkg/a.py").write_text("x = 4\n"),
        "pkg/a.py",
        "left it as",
        TreeModifiedError,
    ),
    "an unpatched file edited": (
        lambda p, q: (p / "pkg/b.py").write_text("no\n"),
        "pkg/b.py",
        "upstream's bytes",
        TreeModifiedError,
    ),
    "another patch": (
        lambda p, q: (q / "0001-change-x.patch").write_text(PATCH.replace("for a", "in a")),
        "pkg/a.py",
        "0001-change-x",
        ProvenanceError,
    ),
    "no patch": (
        lambda p, q: (q / "0001-change-x.patch").unlink(),
        "pkg/a.py",
        "0001-change-x.patch is gone",
        ProvenanceError,
    ),
    "no listing": (lambda p, q: archive.listing_path(p).unlink(), "pkg/b.py", "listing is gone", ProvenanceError),
    "another listing": (
        lambda p, q: archive.listing_path(p).write_text(f"{sha('no')}  pkg/b.py\n"),
        "pkg/b.py",
        "not the one",
        ProvenanceError,
    ),
    "no manifest": (lambda p, q: manifest.beside(p).unlink(), "pkg/b.py", "no folder above it", ProvenanceError),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_link_that_does_not_hold_is_an_error(world, patches, name):
    spoil, path, words, error = BREAKS[name]
    place, ask = world
    spoil(place, patches)
    with pytest.raises(error, match=words):
        ask(path)


def test_an_artifact_that_is_no_longer_pinned_is_an_error(world, kit, patches):
    place, _ = world
    other = kit.table({"up": kit.component({"up-1.tar.gz": "0" * 64})})
    with pytest.raises(ProvenanceError, match=r"up-1.tar.gz is not pinned"):
        provenance.provenance(place / "pkg/b.py", patches=patches.parent, table=other)


def test_a_file_of_a_repository_is_followed_to_its_commit(tmp_path, kit):
    pin = {
        "of": "up",
        "asked_in": "f",
        "dependency": "dep",
        "repository": "https://e.invalid/dep.git",
        "tag": "d" * 40,
        "commit": "d" * 40,
        "tree": "unknown",
        "licence": "MIT",
        "needed": True,
        "why": "wanted",
    }
    pins = kit.table({"up": kit.component({"up-1.tar.gz": "0" * 64})}, {"dep": pin})
    place = tmp_path / "dep"

    def make(temporary):
        temporary.mkdir()
        (temporary / "dep.h").write_text("dep\n")
        archive.write_listing(place, {"dep.h": sha("dep\n")})
        return manifest.Made({"listing": archive.tree_sha256({"dep.h": sha("dep\n")})})

    manifest.once(place, "git", {"repository": pin["repository"], "commit": pin["commit"], "tree": "unknown"}, make)
    assert provenance.provenance(place / "dep.h", table=pins)[-1].what == f"https://e.invalid/dep.git at {'d' * 40}"
    with pytest.raises(ProvenanceError, match="not pinned"):
        provenance.provenance(place / "dep.h", table=kit.table({"up": kit.component({"up-1.tar.gz": "0" * 64})}))


def encoded(data):
    """Return a sha256 as a wheel's RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@pytest.fixture
def installed(tmp_path, kit, patches):
    """A site-packages with the distribution up_cpu 1, patched; returns it with a function that asks."""
    root = tmp_path / "lib/site-packages"
    for path, text in {"pkg/a.py": "x = 1\n", "pkg/b.py": "y = 2\n", "other/c.py": "c\n"}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for name, paths in {"up_cpu-1": ["pkg/a.py", "pkg/b.py"], "stranger-2": ["other/c.py"]}.items():
        rows = [f"{p},sha256={encoded((root / p).read_bytes())},6" for p in paths]
        (root / f"{name}.dist-info").mkdir()
        (root / f"{name}.dist-info/RECORD").write_text("\n".join([*rows, f"{name}.dist-info/RECORD,,"]) + "\n")
    patch.apply(root, Queue.load(patches))
    pins = kit.table(
        {"up": kit.component({"up_cpu-1-a.whl": "1" * 64, "up_cpu-1-b.whl": "2" * 64}, kind="wheel", package="up-cpu")}
    )
    return root, lambda path: provenance.provenance(root / path, patches=patches.parent, table=pins)


def test_an_installed_file_is_followed_through_the_wheels_record(installed):
    _, ask = installed
    assert [link.sha256 for link in ask("pkg/a.py")] == [sha("x = 3\n"), sha(PATCH), sha("x = 1\n"), "1" * 64, "2" * 64]
    assert "up_cpu-1.dist-info/RECORD" in ask("pkg/b.py")[1].known


def test_an_installed_file_that_is_edited_unknown_or_not_pinned(installed):
    root, ask = installed
    with pytest.raises(ProvenanceError, match="stranger-2 is not pinned"):
        ask("other/c.py")
    (root / "pkg/b.py").write_text("no\n")
    with pytest.raises(TreeModifiedError, match="upstream's bytes"):
        ask("pkg/b.py")
    (root / "loose.py").write_text("no\n")
    with pytest.raises(ProvenanceError, match="holds no such file"):
        ask("loose.py")


def test_a_tree_whose_patch_record_tells_of_other_originals_is_an_error(world):
    place, ask = world
    record = json.loads((place / ".sparkforge-patches.up.json").read_text())
    record["files"]["pkg/a.py"]["before"] = sha("forged")
    (place / ".sparkforge-patches.up.json").write_text(json.dumps(record))
    with pytest.raises(TreeModifiedError, match="upstream's bytes"):
        ask("pkg/a.py")
    shutil.rmtree(place)
