"""The default stack's sources from the package index: unpacked, checked, patched, and traced to their pins."""

import os
import subprocess
import sys
import zipfile

import pytest

from sparkforge import pins
from sparkforge.core import manifest
from sparkforge.pins.locks import uv_environment
from sparkforge.pins.wheels import Pick
from sparkforge.sources import archive, bundle, fetch, offline, trees

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def state(large_folder):
    """A separate state folder; downloads go to the shared cache, where they are verified by hash."""
    with pytest.MonkeyPatch.context() as patched, large_folder("state") as folder:
        patched.setenv("SPARKFORGE_STATE", str(folder))
        yield


@pytest.fixture(scope="module")
def fetched(state):
    return trees.fetch_sources("spark", git=False)


def unpacked(stack):
    return {
        name: trees.tree_folder(component, file)
        for name, component in pins.load().stack(stack).components.items()
        for file in component.files
        if component.kind == "sdist" and file.endswith(trees.ARCHIVE)
    }


def test_the_trees_are_what_their_listings_say(fetched):
    for tree in unpacked("spark").values():
        check = ["sha256sum", "--check", "--quiet", "--strict", f"../{tree.name}.sha256"]
        assert subprocess.run(check, cwd=tree, check=False).returncode == 0
        assert archive.tree_sha256(archive.read_listing(tree)) == manifest.load(tree).outputs["listing"]


def test_pip_and_uv_install_from_a_bundles_index_and_from_nothing_else(tmp_path, monkeypatch):
    for name in (offline.VARIABLE, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    filename, info = "tiny_thing-1+cpu-py3-none-any.whl", "tiny_thing-1+cpu.dist-info"
    files = {
        "tiny_thing.py": "x = 1\n", f"{info}/RECORD": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1+cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }  # fmt: skip
    with zipfile.ZipFile(tmp_path / filename, "w") as out:
        for name, text in files.items():
            out.writestr(name, text)
    pick = Pick("Tiny.Thing", filename, fetch.sha256_file(tmp_path / filename))
    members = [bundle.BundleMember.of(f"files/{pick.sha256}/{filename}", tmp_path / filename)]
    members += [bundle.BundleMember.of(path, text.encode()) for path, text in bundle.index_pages([pick]).items()]
    bundle.write(tmp_path / "b.tar", members, [], {})
    bundle.unpack(tmp_path / "b.tar", tmp_path / "out")
    offline.use(tmp_path / "out")
    lock = tmp_path / "lock.txt"

    def install(program, target, sha256, env):
        lock.write_text(f"tiny-thing==1+cpu --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", *program.split(), "install", "--quiet", "--require-hashes", "--no-deps"]
        env = {**os.environ, **env, "UV_CACHE_DIR": str(tmp_path / "uv")}
        command += ["-r", lock, "--target", target]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    for program, env in (("pip", {}), ("uv pip", uv_environment())):
        target = tmp_path / program.replace(" ", "-")
        result = install(program, target, pick.sha256, env)
        assert result.returncode == 0, result.stderr
        assert (target / "tiny_thing.py").read_text() == "x = 1\n"
    assert install("pip", tmp_path / "no", "0" * 64, {}).returncode != 0
    assert not list((tmp_path / "no").glob("*.py"))
