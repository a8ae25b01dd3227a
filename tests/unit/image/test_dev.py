"""The development image's look at mounted checkouts."""

import subprocess
import sys

import pytest

from sparkforge.core.errors import StorageError
from sparkforge.image import dev
from sparkforge.patching import status
from sparkforge.patching.series import Queue

VLLM = dev.CHECKOUTS[0]


@pytest.fixture
def places(tmp_path):
    sources, packages = tmp_path / "src", tmp_path / "site-packages"
    (sources / "vllm/vllm").mkdir(parents=True)
    (sources / "vllm/csrc").mkdir()
    (sources / "vllm/vllm/__init__.py").write_text("here = 'checkout'\n")
    (sources / "vllm/csrc/a.cu").write_text("one")
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm/__init__.py").write_text("here = 'installed'\n")
    (packages / "vllm/_C.abi3.so").write_bytes(b"code")
    return sources, packages


def test_an_empty_folder_is_no_checkout(places, tmp_path):
    sources, _ = places
    assert dev.mounted(VLLM, sources)
    assert not dev.mounted(VLLM, tmp_path)


def test_installed_natives_are_linked_and_own_ones_are_left(places):
    sources, packages = places
    assert dev.link_natives(VLLM, packages, sources) == ["_C.abi3.so"]
    assert (sources / "vllm/vllm/_C.abi3.so").readlink() == packages / "vllm/_C.abi3.so"
    (sources / "vllm/vllm/_C.abi3.so").unlink()
    (sources / "vllm/vllm/_C.abi3.so").write_bytes(b"own")
    assert dev.link_natives(VLLM, packages, sources) == []
    assert (sources / "vllm/vllm/_C.abi3.so").read_bytes() == b"own"


def test_a_link_into_an_image_that_is_gone_is_made_anew(places):
    sources, packages = places
    (sources / "vllm/vllm/_C.abi3.so").symlink_to("/nowhere/_C.abi3.so")
    assert dev.link_natives(VLLM, packages, sources) == ["_C.abi3.so"]


def test_changed_native_sources_are_noticed_until_accepted(places):
    sources, _ = places
    assert dev.changed(VLLM, sources) == []
    (sources / "vllm/csrc/a.cu").write_text("two")
    (sources / "vllm/csrc/b.cu").write_text("new")
    assert dev.changed(VLLM, sources) == ["csrc/a.cu", "csrc/b.cu"]
    assert dev.changed(VLLM, sources) == ["csrc/a.cu", "csrc/b.cu"]
    dev.accept(VLLM, sources)
    assert dev.changed(VLLM, sources) == []


def test_python_sources_need_no_rebuild(places):
    sources, _ = places
    dev.changed(VLLM, sources)
    (sources / "vllm/vllm/__init__.py").write_text("here = 'edited'\n")
    assert dev.changed(VLLM, sources) == []


def test_the_checkout_is_imported_instead_of_the_installed_package(places, tmp_path):
    sources, packages = places
    dev.use([VLLM], packages, sources)
    code = f"import site; site.addsitedir({str(packages)!r}); import vllm; print(vllm.here)"
    told = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "checkout"
    dev.use([], packages, sources)
    told = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "installed"


def test_looking_says_what_to_do(places, capsys):
    sources, packages = places
    dev.check_mounted(packages, "spark", sources)
    (sources / "vllm/csrc/a.cu").write_text("two")
    dev.check_mounted(packages, "spark", sources)
    told = capsys.readouterr().err
    assert "1 native modules linked" in told
    assert "1 native sources changed, such as csrc/a.cu" in told
    assert "flashinfer: no checkout" in told


def test_patches_that_a_checkout_lacks_are_named(kit, places, tmp_path, monkeypatch, capsys):
    sources, packages = places
    lines = "".join(f"line {number}\n" for number in range(9))
    patched = lines.replace("line 4", "ours")
    diff = kit.diff(tmp_path / "d", {"vllm/a.py": lines}, {"vllm/a.py": patched})
    queue = Queue.load(kit.write_queue(tmp_path / "vllm-1.0", diff))
    monkeypatch.setattr(status, "queues", lambda table, stack: [(None, queue)])
    advice = "without 0001-change-something.patch: on the host, ./inv dev.patch CHECKOUT --stack spark"
    for content, advised in ((lines, True), ("moved\n" + lines, True), (patched, False), (f"edited\n{patched}", False)):
        (sources / "vllm/vllm/a.py").write_text(content)
        dev.check_mounted(packages, "spark", sources)
        assert (advice in capsys.readouterr().err) is advised


def test_a_checkout_that_may_not_be_read_is_an_error_of_ours(tmp_path, monkeypatch):
    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(dev.Path, "is_file", refuse)
    with pytest.raises(
        StorageError, match="cannot read the checkout", check=lambda error: error.code == "storage.access"
    ):
        dev.mounted(VLLM, tmp_path)
