import ctypes
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from expected import refused
from programs import write_files

from sparkforge.compile import cache
from sparkforge.core.errors import UsageError
from sparkforge.core.files import locked

pytestmark = pytest.mark.needs("ninja", "c++")


def clean(*, dry_run=False, yes=False, **selection):
    return cache.clean(cache.Selection(**selection), dry_run=dry_run, yes=yes)


def left(cached):
    return sorted(path.name for path in (cached.folders["page"].parent).iterdir() if path.name != "tmp")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("changed", "include/common.cuh", ["page", "rope"]), ("changed", "csrc/rope.cu", ["rope"]),
     ("changed", "csrc/other.cu", []), ("names", "[pr]*", ["page", "rope"])],
)  # fmt: skip
def test_modules_are_removed_by_name_or_changed_source(cached, monkeypatch, option, value, expected):
    monkeypatch.chdir(cached.base)
    assert clean(**{option: [Path(value) if option == "changed" else value]}) == expected
    assert left(cached) == sorted({"page", "rope", "sampling"} - set(expected))


def test_variants_and_generated_modules_are_found(cached):
    moe, filtered, gemm = "fused_moe_120", "fused_moe_120_fp8xfp4", "mxfp8_gemm_cutlass_sm120"
    for name in (moe, filtered, gemm):
        cached.make(cached.base, name, "common.cuh")
    jit = Path("/x/site-packages/flashinfer/jit")
    for selection, expected in (
        ({"names": [moe]}, [moe, filtered]), ({"names": [filtered]}, [filtered]),
        ({"changed": [jit / "fused_moe.py"]}, [moe, filtered]), ({"changed": [jit / "gemm/core.py"]}, [gemm]),
        ({"changed": [jit]}, [moe, filtered, gemm, "sampling"]),
    ):  # fmt: skip
        chosen = cache.Selection(**selection).of(cache.modules(cached.root))
        assert sorted(module.name for module in chosen) == expected


def test_stale_is_another_version_a_missing_source_or_no_recipe(cached):
    cached.make(cached.base, "old", "common.cuh", version="0.6.9")
    (cached.base / "csrc/rope.cu").unlink()
    (cached.folders["sampling"] / "build.ninja").unlink()
    assert clean(stale=True, dry_run=True) == []
    assert clean(stale=True) == ["old", "rope", "sampling"]
    assert left(cached) == ["page"]
    assert clean(stale=True) == []


@pytest.mark.parametrize("level", [".", "..", "../.."])
def test_a_link_to_the_outside_is_refused_at_every_level(cached, tmp_path, level):
    folder = (cached.folders["page"] / level).resolve()
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    with refused("storage.cache", r"page is not removed: .* is a link to .*outside"):
        clean(names=["page"])
    assert list(outside.rglob("page.so"))


def test_a_link_inside_a_module_is_removed_and_not_followed(cached, tmp_path):
    write_files(tmp_path, {"precious/file": "kept"})
    (cached.folders["page"] / "link").symlink_to(tmp_path / "precious")
    assert clean(names=["page"]) == ["page"]
    assert (tmp_path / "precious/file").read_text() == "kept"


def load_and_wait(library, loaded, end):
    ctypes.CDLL(library)
    loaded.set()
    end.wait(60)


def test_modules_mapped_by_a_live_process_stay(cached):
    library = cached.folders["page"] / "page.so"
    context = multiprocessing.get_context("spawn")
    loaded, end = context.Event(), context.Event()
    user = context.Process(target=load_and_wait, args=(str(library), loaded, end))
    user.start()
    try:
        assert loaded.wait(60)
        with refused("storage.cache", f"1 of 3 modules.*page is not removed: process {user.pid} uses it"):
            clean(everything=True, yes=True)
    finally:
        end.set()
        user.join()
    assert left(cached) == ["page"]
    assert clean(names=["page"]) == ["page"]


def test_what_flashinfer_is_building_stays(cached):
    lock = cached.locks / "page.lock"
    code = f"import fcntl, time; f = open({str(lock)!r}, 'a'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        with refused("storage.busy", r"cannot remove page: another .* holds .*page.lock"):
            clean(names=["page"])
    finally:
        holder.kill()
        holder.communicate()
    assert left(cached) == ["page", "rope", "sampling"]
    with locked(lock, "test that it is free again"):
        pass


def test_an_interrupted_removal_is_finished_whatever_is_chosen(cached):
    for name, options in (("page", {"stale": True}), ("sampling", {"names": ["rope"]})):
        cached.folders[name].rename(cached.folders[name].with_name(f".{name}.1{cache.REMOVING}"))
        before = left(cached)
        clean(dry_run=True, **options)
        assert left(cached) == before, "a dry run removes nothing"
        clean(**options)
        assert [name for name in left(cached) if name.startswith(".")] == []


def test_an_empty_selection_and_all_without_a_terminal_are_refused(cached):
    for selection, reason in (
        ({"names": ["rope", "pgae"]}, "no module pgae"), ({"names": ["[pr]*", "fused_*"]}, r"no module fused_\*"),
        ({}, "nothing chosen"), ({"everything": True}, "no terminal"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=reason):
            clean(**selection)
    assert left(cached) == ["page", "rope", "sampling"]


@pytest.fixture
def image(cached, tmp_path, empty_root, monkeypatch):
    """An image's folders: the key file next to the pins, and a volume with the caches of two images."""
    (empty_root / "key").write_text("0123\n")
    (tmp_path / "volume/4567").mkdir(parents=True)
    (tmp_path / "volume/0123").symlink_to(cached.base)
    cached.make(tmp_path / "volume/4567", "old", "common.cuh")
    monkeypatch.setenv("SPARKFORGE_CACHE_DIR", str(tmp_path / "volume"))
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE")
    return cached


def test_in_an_image_the_caches_of_the_whole_volume_are_reached(image, capfd):
    assert cache.main(["list"]) == 0
    assert len([line for line in capfd.readouterr().err.splitlines() if "/121a/" in line]) == 4
    assert cache.main(["clean", "--module", "ol?,r*"]) == 0
    assert "removed 2 modules" in capfd.readouterr().err
    assert left(image) == ["page", "sampling"]
    assert cache.main(["clean", "--module", "ol?"]) == 2
    assert "./inv clean-cache --container --list   # on the host" in capfd.readouterr().err
