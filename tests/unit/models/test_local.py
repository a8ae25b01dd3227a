"""The folder that is served for a repository's name: fetched folders, and Hugging Face's cache in its own layout."""

import os
from pathlib import Path

import pytest
from expected import refused

from sparkforge.core import files
from sparkforge.core.errors import StorageError
from sparkforge.models import local, recipes

pytestmark = pytest.mark.usefixtures("no_models")
NAME = "openai/gpt-oss-120b"
PINNED = recipes.pinned_revision(NAME)


def cache(home, *commits, main="", weights=True, name=NAME):
    """Write a hub cache with snapshots of links to blobs, and return the repository's folder in it."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    for commit in commits:
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in ("config.json", *(["model.safetensors"] if weights else [])):
            blob = folder / "blobs" / f"{commit}-{file}"
            blob.write_text("{}")
            (snapshot / file).symlink_to(Path("../../blobs") / blob.name)
    if main:
        (folder / "refs/main").write_text(main)
    return folder


@pytest.mark.parametrize(
    ("variable", "value", "home"),
    [
        ("HF_HOME", "place", "place"), ("HF_HUB_CACHE", "place/hub", "place"),
        ("XDG_CACHE_HOME", "place", "place/huggingface"), ("", "", "home/.cache/huggingface"),
        ("", "", "absent/.cache/huggingface"), ("", "", "mounted"),  # both mounted into a container
    ],
)  # fmt: skip
def test_the_cache_is_found_where_it_may_lie(tmp_path, variable, value, home):
    folder = cache(tmp_path / home, "c1", main="c1")
    assert local.find(NAME, {variable: str(tmp_path / value)}) == folder / "snapshots/c1"


@pytest.mark.parametrize(
    ("commits", "main", "revision", "expected"),
    [
        (("c1", "c2"), "c2", "", "c2"), (("c1", PINNED), "c1", "", PINNED), (("c1",), "", "", "c1"),
        (("c1", "c2"), "c1", "c2", "c2"), (("c1", "c2"), "c1", "main", "c1"),
    ],
)  # fmt: skip
def test_the_pinned_revision_or_main_is_served(tmp_path, commits, main, revision, expected):
    cache(tmp_path, *commits, main=main)
    assert local.find(NAME, {"HF_HOME": str(tmp_path)}, revision).name == expected


def test_a_snapshot_with_weights_comes_before_one_that_has_none(tmp_path):
    folder = cache(tmp_path, "c1", PINNED, main="c1")
    (folder / "snapshots" / PINNED / "model.safetensors").unlink()
    assert local.find(NAME, {"HF_HOME": str(tmp_path)}).name == "c1"


def test_what_was_fetched_is_found_and_a_folder_is_itself(tmp_path):
    for folder in (tmp_path / "mounted/gpt-oss-120b", tmp_path / "checkout/models/gpt-oss-120b"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        assert local.find(NAME, {}) == folder
    assert local.find(str(tmp_path), {}) == tmp_path
    assert local.find("/nowhere/at/all", {}) == Path("/nowhere/at/all")


def test_a_snapshot_whose_blobs_are_not_mounted_says_so(tmp_path):
    folder = cache(tmp_path, "c1", main="c1")
    for blob in (folder / "blobs").iterdir():
        blob.unlink()
    with pytest.raises(StorageError, match=r"config\.json is a link to \.\./\.\./blobs/") as caught:
        local.find(NAME, {"HF_HOME": str(tmp_path)})
    assert "mount the whole cache" in caught.value.fix
    assert "pull" not in caught.value.fix


@pytest.fixture
def somebody_else(monkeypatch, tmp_path):
    """Simulates another user than the files' owner by the mode's last three bits, because tests run as root.

    Folders above the test's own count as open, although pytest closes them to others.
    """

    def may(path, mode):
        target = Path(path)
        if not target.exists() or tmp_path not in (target, *target.parents):
            return target.exists()
        return not mode & ~target.stat().st_mode & 7

    tmp_path.chmod(0o755)
    monkeypatch.setattr(files.os, "access", may)
    return tmp_path


@pytest.mark.parametrize(("part", "mode"), [("hub", 0o700), ("blobs", 0o750), ("snapshots", 0o700), ("a blob", 0o600)])
def test_a_cache_of_another_user_is_reported_with_owner_and_mode(somebody_else, part, mode):
    folder = cache(somebody_else, "c1", main="c1")
    path = {"hub": somebody_else / "hub", "a blob": folder / "blobs/c1-config.json"}.get(part, folder / part)
    former = path.stat().st_mode
    path.chmod(mode)
    with refused("storage.access") as caught:
        local.find(NAME, {"HF_HOME": str(somebody_else)})
    path.chmod(former)
    assert f"Permission denied: {path} belongs to uid {os.getuid()}, group {os.getgid()}" in caught.value.why
    assert f"mode {mode:04o}" in caught.value.why
    assert caught.value.fix.startswith(f"chmod -R a+rX {path} ")
    option = f"--group-add {os.getgid()}" if mode == 0o750 else f"--user {os.getuid()}:{os.getgid()}"
    assert caught.value.fix.endswith(option)
    assert "fetch" not in caught.value.fix


def test_the_api_offers_a_snapshot_by_its_repository(tmp_path):
    snapshot = cache(tmp_path, "c1") / "snapshots/c1"
    assert (local.name_of(snapshot), local.hub_cache_of(snapshot)) == (NAME, tmp_path / "hub")
    assert (local.name_of(tmp_path / "mine"), local.hub_cache_of(tmp_path / "mine")) == ("mine", None)
