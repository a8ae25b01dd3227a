"""The default stack's sources as the package index has them: unpacked, judged, patched, followed back to their pins."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lab.upstream import hidden
from sparkforge import pins
from sparkforge.core import manifest
from sparkforge.core.errors import InputError
from sparkforge.pins.wheels import Pick
from sparkforge.sources import archive, bundle, fetch, offline, trees

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def state(large_folder):
    """A state of its own; downloads go to the shared cache, where they are verified by hash."""
    with pytest.MonkeyPatch.context() as patched, large_folder("state") as folder:
        patched.setenv("SPARKFORGE_STATE", str(folder))
        yield


@pytest.fixture(scope="module")
def fetched(state):
    return trees.fetch_sources("spark", git=False)


# name → (needed by gpt-oss on compute capability 12.1, the variable that takes a copy), as read in vLLM 0.32.0's files
HIDDEN = {
    "cutlass": (True, "VLLM_CUTLASS_SRC_DIR"),
    "triton_kernels": (True, "TRITON_KERNELS_SRC_DIR"),
    "vllm-flash-attn": (True, "VLLM_FLASH_ATTN_SRC_DIR"),
    "deepgemm": (False, "DEEPGEMM_SRC_DIR"),
    "deepselect": (False, "DEEPSELECT_SRC_DIR"),
    "fmha_sm100": (False, "FMHA_SM100_SRC_DIR"),
    "flashmla": (False, "FLASH_MLA_SRC_DIR"),
    "flashkda": (False, "FLASH_KDA_SRC_DIR"),
    "qutlass": (False, "QUTLASS_SRC_DIR"),
    "tml_fa4": (False, "TML_FA4_SRC_DIR"),
    "oneDNN": (False, "FETCHCONTENT_SOURCE_DIR_ONEDNN"),
    "arm_compute": (False, "ACL_ROOT_DIR"),
    "llm-multimodal": (False, None),
    "oss-harmony": (False, None),
    "zeromq": (False, None),
}


def unpacked(stack):
    """Return {component: folder} for the source archives of a stack."""
    return {
        name: trees.tree_folder(component, file)
        for name, component in pins.load().stack(stack).components.items()
        for file in component.files
        if component.kind == "sdist" and file.endswith(trees.ARCHIVE)
    }


def test_every_hidden_dependency_of_vllm_is_pinned_and_known(fetched):
    pinned = pins.load().stacks["spark"].git.values()
    declared = hidden.declared(unpacked("spark")["vllm"])
    assert {source.name: source.override for source in declared} == {
        name: variable for name, (_, variable) in HIDDEN.items()
    }
    assert len(declared) == len(pinned) == 17
    needed = {pin.dependency for pin in pinned if pin.needed}
    assert needed == {name for name, (wanted, _) in HIDDEN.items() if wanted}


def test_every_source_is_there_and_a_second_run_reads_nothing_anew(fetched):
    files = [source for source in fetched if source.path]
    assert files
    again = trees.fetch_sources("spark", git=False)
    assert [source.state for source in again if source.path] == [
        "file" if source.state == "file" else "unchanged" for source in files
    ]


def test_the_trees_are_what_their_listings_say(fetched):
    for tree in unpacked("spark").values():
        check = ["sha256sum", "--check", "--quiet", "--strict", f"../{tree.name}.sha256"]
        assert subprocess.run(check, cwd=tree, check=False).returncode == 0
        assert archive.tree_sha256(archive.read_listing(tree)) == manifest.load(tree).outputs["listing"]


def test_flashinfers_sdist_and_wheel_hold_the_same_third_party_trees(fetched):
    tree = unpacked("spark")["flashinfer"]
    component = pins.load().component("spark", "flashinfer")
    (wheel,) = (fetch.cached(name, sha) for name, sha in component.files.items() if name.endswith(".whl"))
    listing = archive.read_listing(tree)
    with zipfile.ZipFile(wheel) as opened:
        for name, count in {"cutlass": 1293, "cccl": 2694, "spdlog": 106}.items():
            inside = [
                entry
                for entry in opened.namelist()
                if entry.startswith(f"flashinfer/data/{name}/") and entry[-1] != "/"
            ]
            assert len(inside) == count == len([path for path in listing if path.startswith(f"3rdparty/{name}/")])
            some = inside[:: max(1, count // 25)]
            assert all(
                listing[entry.replace("flashinfer/data", "3rdparty")] == sha_of(opened.read(entry)) for entry in some
            )
    version = (tree / "3rdparty/cutlass/include/cutlass/version.h").read_text()
    assert [f"#define CUTLASS_{part}" in version for part in ("MAJOR 4", "MINOR 5", "PATCH 0")] == [True] * 3


def sha_of(data):
    return bundle.BundleMember.of("", data).sha256


def test_upstream_cannot_add_or_move_a_dependency_unnoticed(fetched, tmp_path):
    tree = unpacked("spark")["vllm"]
    pinned = pins.load().stacks["spark"].git
    for file in (tree / "cmake").rglob("*.cmake"):
        (tmp_path / file.relative_to(tree)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(tree))
    for name in ("CMakeLists.txt", "rust/Cargo.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(tree / name, tmp_path / name)
    hidden.check(hidden.declared(tmp_path), "vllm 0.32.0", pinned)
    main = tmp_path / "CMakeLists.txt"
    main.write_text(main.read_text().replace('"v4.7.1"', '"v4.8.0"'))
    with pytest.raises(
        InputError,
        match=r"cutlass v4.8.0 .* is pinned as cutlass at v4.7.1",
        check=lambda error: error.code == "input.pins",
    ):
        hidden.check(hidden.declared(tmp_path), "vllm 0.32.0", pinned)
    shutil.copy(tree / "CMakeLists.txt", main)
    (tmp_path / "cmake/external_projects/newcomer.cmake").write_text(
        "FetchContent_Declare(newcomer GIT_REPOSITORY https://example.org/n.git GIT_TAG 1)"
    )
    with pytest.raises(
        InputError,
        match=r"newcomer 1 from https://example.org/n.git .* is not in pins.toml",
        check=lambda error: error.code == "input.pins",
    ):
        hidden.check(hidden.declared(tmp_path), "vllm 0.32.0", pinned)


def test_pip_and_uv_install_from_a_bundles_index_and_from_nothing_else(tmp_path, monkeypatch):
    for name in (offline.VARIABLE, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    filename = "tiny_thing-1+cpu-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / filename, "w") as out:
        out.writestr("tiny_thing.py", "x = 1\n")
        out.writestr("tiny_thing-1+cpu.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1+cpu\n")
        out.writestr(
            "tiny_thing-1+cpu.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        out.writestr("tiny_thing-1+cpu.dist-info/RECORD", "")
    pick = Pick("Tiny.Thing", filename, fetch.sha256_file(tmp_path / filename))
    pages = [bundle.BundleMember.of(path, text.encode()) for path, text in bundle.index_pages([pick]).items()]
    bundle.write(
        tmp_path / "b.tar",
        [bundle.BundleMember.of(f"files/{pick.sha256}/{filename}", tmp_path / filename), *pages],
        [],
        {},
    )
    bundle.unpack(tmp_path / "b.tar", tmp_path / "out")
    offline.use(tmp_path / "out")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"tiny-thing==1+cpu --hash=sha256:{pick.sha256}\n")
    arguments = ["--quiet", "--require-hashes", "--no-deps", "-r", str(lock), "--target"]
    from sparkforge.pins.locks import uv_environment

    for program, env in (("pip", {}), ("uv pip", uv_environment())):
        target = tmp_path / program.replace(" ", "-")
        result = run([sys.executable, "-m", *program.split(), "install", *arguments, target], env)
        assert result.returncode == 0, result.stderr
        assert (target / "tiny_thing.py").read_text() == "x = 1\n"
    lock.write_text(f"tiny-thing==1+cpu --hash=sha256:{'0' * 64}\n")
    assert run([sys.executable, "-m", "pip", "install", *arguments, tmp_path / "no"], {}).returncode != 0
    assert not list((tmp_path / "no").glob("*.py"))


def run(command, env):
    import os

    clean = {**os.environ, **env, "UV_CACHE_DIR": str(Path(command[-1]).parent / "uv")}
    return subprocess.run([str(word) for word in command], env=clean, capture_output=True, text=True, check=False)
