"""`./inv clean-cache --files` on a cache with files of the real pins and locks, and with others."""

import fcntl
import shutil
import subprocess
import sys

import pytest

from sparkforge import pins
from sparkforge.core import paths
from sparkforge.core.errors import UsageError
from sparkforge.core.paths import ROOT
from sparkforge.pins.locks import lock_path
from sparkforge.pins.patched import load_patched
from sparkforge.sources import fetch, prune

OLD, OTHER = "vllm-0.32.0+sparkforge.2.whl", "vllm-0.29.0.tar.gz"


@pytest.fixture
def cache(kit):
    """Return the paths of the files that a pin, the patched lock and a requirement lock name, and of two others."""
    component = next(component for component in pins.load().components() if component.files)
    patched = next(iter(load_patched().values()))
    locked = prune.SHA256.findall(lock_path("tools").read_text())[0]
    named = [fetch.cached(*next(iter(component.files.items()))), fetch.cached(patched.file, patched.sha256)]
    named += [fetch.cached("locked.whl", locked)]
    for path in named:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"named")
    others = [fetch.cached(name, kit.seed(name, name.encode() * times)) for name, times in ((OLD, 2_000), (OTHER, 1))]
    others[0].with_name(fetch.VERIFIED).write_text("[]")
    return named, others


def test_what_no_pin_or_lock_names_is_removed_with_what_was_read_of_it(cache, capsys):
    named, (old, other) = cache
    members = paths.cache() / "members"
    for path in (named[0], other):
        (members / path.parent.name).mkdir(parents=True)
    prune.prune(dry_run=False, yes=True)
    assert [path.exists() for path in named] == [True, True, True]
    assert sorted((paths.cache() / "files").iterdir()) == sorted(path.parent for path in named)
    assert [folder.name for folder in members.iterdir()] == [named[0].parent.name]
    output = capsys.readouterr().err.splitlines()
    assert output == [
        f"remove {OLD} (0.1 MB, sha256 {old.parent.name[:12]})",
        f"remove {OTHER} (0.0 MB, sha256 {other.parent.name[:12]})",
        "removed 2 files, freed 0.1 MB",
    ]
    prune.prune(dry_run=False, yes=True)
    assert "nothing to remove in" in capsys.readouterr().err


def test_a_dry_run_says_the_same_and_removes_nothing(cache, capsys):
    _, others = cache
    prune.prune(dry_run=True, yes=False)
    assert [path.exists() for path in others] == [True, True]
    output = capsys.readouterr().err
    assert f"would remove {OLD} (0.1 MB" in output
    assert "2 files in" in output
    assert "0.1 MB (dry run: nothing was removed)" in output


def test_it_asks_first_and_needs_a_terminal_for_it(cache, capsys, monkeypatch):
    _, others = cache
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(UsageError, match="--files asks first"):
        prune.prune(dry_run=False, yes=False)
    monkeypatch.setattr(prune, "confirmed", lambda *_: False)
    prune.prune(dry_run=False, yes=False)
    assert [path.exists() for path in others] == [True, True]
    monkeypatch.setattr(prune, "confirmed", lambda *_: True)
    prune.prune(dry_run=False, yes=False)
    assert [path.exists() for path in others] == [False, False]


def test_what_is_no_file_of_the_cache_stays(cache, tmp_path):
    folder = paths.cache() / "files"
    (folder / "notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / ("0" * 64)).symlink_to(tmp_path / "elsewhere")
    prune.prune(dry_run=False, yes=True)
    assert (folder / "notes").is_dir()
    assert (folder / ("0" * 64)).is_symlink()


def test_a_file_is_removed_under_the_lock_that_its_download_takes(cache):
    _, others = cache
    removed = []

    def remove(folder, **_):
        removed.append(folder)
        if folder.parent.name == "files":
            with (paths.cache() / "locks" / f"{folder.name}.lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        real(folder, ignore_errors=True)

    real = shutil.rmtree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparkforge.sources.prune.shutil.rmtree", remove)
        prune.prune(dry_run=False, yes=True)
    assert {path.parent for path in others} <= set(removed)


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_nothing_that_is_trusted(kit, cache):
    named, (old, other) = cache

    def check():
        assert all(path.exists() for path in named)
        assert not [path for path in (old, other) if path.exists() and not fetch.intact(path, path.parent.name)]

    assert kit.kill_at_each_step(lambda: prune.prune(dry_run=False, yes=True), check) > 2
    assert not prune.unnamed()


def test_an_empty_machine_has_nothing_to_remove(capsys):
    prune.prune(dry_run=True, yes=False)
    assert "nothing to remove in" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_takes_files_with_a_dry_run_alone(cache):
    command = [sys.executable, "-m", "sparkforge.cli", "clean-cache", "--files", "--dry-run"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert f"would remove {OLD}" in result.stderr
    result = subprocess.run([*command, "--stale"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == UsageError.exit_code
    assert "--files goes with --dry-run and --yes alone" in result.stderr
