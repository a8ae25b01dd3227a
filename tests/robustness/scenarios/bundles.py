"""Make a bundle over an older bundle, and unpack a bundle over an older folder."""

import json
import platform
import shutil
import sys

from robustness.scenario import BUSY, Scenario, cached, component, sha256, write
from robustness.scenarios import archives
from sparkforge import pins
from sparkforge.core import manifest, paths
from sparkforge.pins import Pins, wheels
from sparkforge.pins.wheels import Pick
from sparkforge.sources import bundle

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
TORCH = f"torch-1+cpu-{TAG}-{TAG}-manylinux_2_28_{platform.machine()}.whl"
WHEEL = "some_thing-1-py3-none-any.whl"


def _checkout(work):
    """Make a small checkout with pins, locks and patches for the bundle, and fill the cache with their files."""
    for name in ("pins.toml", "locks/tools.txt", "locks/embedded.txt", "patches/up-1/series"):
        write(work / "root" / name, name)
    sources = archives.tar("up-1", {"CMakeLists.txt": b"project(up)\n"})
    up = component("up", "up-1.tar.gz", sources, "sdist")
    torch = {**component("torch", TORCH, b"torch"), "version": "1+cpu", "index": "http://127.0.0.1:9"}
    cached("up-1.tar.gz", sources)
    cached(TORCH, b"torch")
    table = Pins.model_validate({
        "schema": 1, "default": "spark", "devices": {"embedded": "embedded"},
        "stacks": {"spark": {"summary": "s", "components": {"up": up}},
                   "embedded": {"summary": "e", "components": {"torch": torch}}},
        "environments": {"embedded": {"lock": "embedded", "wheels": ["embedded/torch"], "size": 1}},
    })  # fmt: skip
    pick = Pick("Some.Thing", WHEEL, cached(WHEEL, b"wheel" * 10_000))
    paths.ROOT = work / "root"
    bundle.lock_path = lambda name: work / f"root/locks/{name}.txt"
    pins.load = lambda *_arguments: table
    wheels.picks = lambda *_arguments: [pick]


def _prepare_make(work):
    _checkout(work)
    bundle.make(work / "out/b.tar", stack="spark")
    write(work / "root/patches/up-1/0001-new.patch", "a patch more")
    write(work / "out/mine.tar", "mine")


def _make(work):
    bundle.make(work / "out/b.tar", stack="spark")


def _standing(folder):
    """Return the artifact, or the older one that was moved aside until the next run restores it."""
    aside = sorted(folder.parent.glob(f".{folder.name}.old*"))
    return next((path for path in (folder, *aside) if path.exists()), folder)


def _judge_make(work):
    """The old or the new bundle is complete: a failed run never loses an older bundle."""
    copy, folder = work / "tmp/judged.tar", work / "tmp/judged"
    shutil.copyfile(_standing(work / "out/b.tar"), copy)
    bundle.unpack(copy, folder)  # verifies every member
    assert json.loads((folder / "index.json").read_bytes())["members"]
    manifest.remove(folder)
    manifest.beside(folder).unlink(missing_ok=True)


def _prepare_unpack(work):
    _checkout(work)
    bundle.make(work / "old.tar", stack="spark")
    bundle.unpack(work / "old.tar", work / "offline/b")
    write(work / "root/patches/up-1/0001-new.patch", "a patch more")
    bundle.make(work / "new.tar", stack="spark")
    write(work / "offline/mine.txt", "mine")


def _unpack(work):
    bundle.unpack(work / "new.tar", work / "offline/c")


def _judge_unpack(work):
    """The old bundle's folder is unchanged, and the new bundle's is complete or absent."""
    for folder in (work / "offline/b", work / "offline/c"):
        if folder == work / "offline/b" or folder.exists():
            for name, entry in json.loads((folder / "index.json").read_bytes())["members"].items():
                data = (folder / name).read_bytes()
                assert sha256(data) == entry["sha256"], name


VOLATILE = ("*.manifest.json",)
SCENARIOS = [
    Scenario("bundle", _prepare_make, _make, _judge_make, volatile=VOLATILE, races=(0, BUSY), cost=2.0),
    Scenario("bundle-unpack", _prepare_unpack, _unpack, _judge_unpack, volatile=VOLATILE, races=(0, BUSY), cost=2.0),
]
