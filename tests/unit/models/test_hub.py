"""Fetching a checkpoint from a small real hub on loopback, through the hub's own library, and from folders."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import write_files
from waiting import wait_for

from sparkforge.core import errors
from sparkforge.core.paths import ROOT
from sparkforge.models import hub
from sparkforge.models import recipes as models
from sparkforge.models.hub_online import Hub
from sparkforge.models.hub_source import Mirror

_spec = importlib.util.spec_from_file_location("hub_server", Path(__file__).with_name("hub_server.py"))
hub_server = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hub_server)

NAME = "openai/gpt-oss-120b"
COMMIT = hub_server.COMMIT
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
READ = [
    "chat_template.jinja", "config.json", "generation_config.json", *SHARDS, "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json",
]  # fmt: skip


@pytest.fixture
def server(monkeypatch):
    server = hub_server.HubServer(hub_server.checkpoint())
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    server.close()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "models" / "gpt-oss-120b"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(*files):
    """Change the last bit of each file."""
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_only_files_that_vllm_reads_are_fetched_with_the_right_bytes(server, target):
    assert hub.fetch_checkpoint(Hub(NAME, "main"), target) == target
    assert names(target) == sorted([*READ, "sparkforge-model.json"])
    assert all((target / name).read_bytes() == server.files[name] for name in READ)
    note = json.loads((target / "sparkforge-model.json").read_text())
    assert (note["revision"], note["source"]) == (COMMIT, NAME)
    assert note["files"][SHARDS[0]]["sha256"] == hashlib.sha256(server.files[SHARDS[0]]).hexdigest()
    assert note["files"]["config.json"]["sha256"] == hashlib.sha256(server.files["config.json"]).hexdigest()
    assert names(target.parent) == [".gpt-oss-120b.lock", "gpt-oss-120b"]


def test_a_damaged_file_is_brought_again(server, target, capsys):
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    damage(target / SHARDS[1], target / "config.json")  # the first is verified by sha256, the second by its git blob
    server.asked.clear()
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert sorted(server.downloads()) == [("config.json", 0), (SHARDS[1], 0)]
    assert "fetching it again" in capsys.readouterr().err
    assert (target / SHARDS[1]).read_bytes() == server.files[SHARDS[1]]


def test_a_corrupted_shard_is_refused_and_not_kept(server, target):
    good = server.files[SHARDS[0]]
    server.files[SHARDS[0]] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(errors.IntegrityError, match=SHARDS[0]):
        hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert not target.exists()
    assert SHARDS[0] not in names(target.with_name(".gpt-oss-120b.sparkforge-partial"))
    server.files[SHARDS[0]] = good
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert (target / SHARDS[0]).read_bytes() == good


@pytest.mark.slow
def test_a_killed_run_is_resumed(server, target, tmp_path):
    server.files = server.listed = hub_server.checkpoint(size=40_000_000)  # the library writes pieces of 10 MB
    server.delay = 0.002
    command = [sys.executable, "-m", "sparkforge.models.hub", NAME, "--revision", COMMIT, "--to", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    child = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    work = target.with_name(".gpt-oss-120b.sparkforge-partial")
    wait_for(lambda: [part for part in work.glob(".model-*.part") if part.stat().st_size > 1_000_000])
    assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not target.exists()
    assert not [name for name in names(work) if name in SHARDS]
    server.delay = 0.0
    server.asked.clear()
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(target)
    assert max(begin for name, begin in server.downloads() if name in SHARDS) > 1_000_000
    assert all((target / name).read_bytes() == server.files[name] for name in SHARDS)
    assert not list(target.glob(".*"))


def test_another_revisions_half_is_not_continued(server, target):
    work = target.with_name(".gpt-oss-120b.sparkforge-partial")
    work.mkdir(parents=True)
    hub._part(work, hub.RemoteFile(SHARDS[0], 100, f"sha256:{'0' * 64}")).write_bytes(b"old")
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert (SHARDS[0], 0) in server.downloads()
    assert not list(target.glob(".*"))


def test_a_revision_or_name_that_is_not_there_is_named(server):
    for name, revision, message in (
        (NAME, "v9", "no revision v9"),
        ("openai/gpt-oss-1b", "main", "no such repository"),
        ("not a name", "main", "no such repository"),
    ):
        with pytest.raises(errors.NetworkError, match=message):
            Hub(name, revision)


def test_without_a_network_the_error_names_mirrors(server, monkeypatch):
    server.close()
    with pytest.raises(errors.NetworkError, match="with --mirror"):
        Hub(NAME, "main")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(errors.NetworkError, match="unset HF_HUB_OFFLINE"):
        Hub(NAME, "main")


def test_a_gated_repository_asks_for_a_token_and_takes_it(server, target, monkeypatch):
    server.token = "hf_secret"
    with pytest.raises(errors.NetworkError, match="set HF_TOKEN"):
        Hub(NAME, "main")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.fetch_checkpoint(Hub(NAME, "main"), target)
    assert target.exists()


def test_too_little_room_is_said_before_anything_is_brought(server, target, monkeypatch):
    usage = shutil.disk_usage(target.parent.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=500_000))
    with pytest.raises(errors.StorageError, match="not enough room for openai/gpt-oss-120b"):
        hub.fetch_checkpoint(Hub(NAME, "main"), target)
    assert server.downloads() == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (SHARDS[1], None, "is missing"),
        ("config.json", b'{"model_type": "llama"}', "'llama'"),
        ("config.json", b'{"model_type": "gpt_oss"}', "hidden_size makes no sense"),
        ("config.json", b"[]", "config.json"),
        ("config.json", b'{"model_type": "gpt_oss", "quantization_config": [1]}', "config.json"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("model.safetensors.index.json", b"{", "gpt-oss-120b"),
    ],
)
def test_an_inconsistent_checkpoint_is_not_accepted(server, target, name, data, message):
    if data is None:
        del server.listed[name]
    else:
        server.listed[name] = server.files[name] = data
    with pytest.raises(errors.InputError, match=message):
        hub.fetch_checkpoint(Hub(NAME, "main"), target)
    assert not target.exists()


@pytest.fixture
def fetched(server, tmp_path):
    return hub.fetch_checkpoint(Hub(NAME, COMMIT), tmp_path / "there" / "openai" / "gpt-oss-120b")


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_a_mirror_is_a_copy_or_a_folder_of_copies(fetched, target, levels, server):
    server.asked.clear()
    folder = [fetched, fetched.parent, fetched.parent.parent][levels]
    source = Mirror(folder, NAME, "")
    assert source.revision == COMMIT
    hub.fetch_checkpoint(source, target)
    assert (target / SHARDS[0]).read_bytes() == server.files[SHARDS[0]]
    assert server.asked == []


def test_a_mirrors_damage_is_found_by_the_hashes_of_its_note_or_by_structure_which_is_said(fetched, target, capsys):
    damage(fetched / SHARDS[0])
    with pytest.raises(errors.IntegrityError, match=SHARDS[0]):
        hub.fetch_checkpoint(Mirror(fetched, NAME, ""), target)
    assert not target.exists()
    (fetched / "sparkforge-model.json").unlink()
    (fetched / SHARDS[0]).write_bytes((fetched / SHARDS[0]).read_bytes()[:-1])
    source = Mirror(fetched, NAME, "")
    assert "has no hashes" in capsys.readouterr().err
    with pytest.raises(errors.InputError, match="its header promises"):
        hub.fetch_checkpoint(source, target)


def test_a_mirror_in_the_librarys_cache_form_is_checked_by_its_links(server, target, tmp_path):
    cache = tmp_path / "cache" / "models--openai--gpt-oss-120b"
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name in READ:
        blob = cache / "blobs" / hashlib.sha256(server.files[name]).hexdigest()
        blob.write_bytes(server.files[name])
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    source = Mirror(tmp_path / "cache", NAME, COMMIT)
    assert hub.fetch_checkpoint(source, target) == target
    assert not (target / SHARDS[0]).is_symlink()
    damage(snapshot / SHARDS[0])
    with pytest.raises(errors.IntegrityError):
        hub.fetch_checkpoint(source, target.with_name("other"))


def test_a_mirror_of_something_else_is_named(fetched, tmp_path):
    with pytest.raises(errors.NetworkError, match="holds no openai/gpt-oss-20b"):
        Mirror(tmp_path, "openai/gpt-oss-20b", "")
    with pytest.raises(errors.NetworkError, match="another revision"):
        Mirror(fetched, NAME, "f" * 40)


def test_the_command_names_errors_and_bad_arguments(server, tmp_path, capsys):
    assert hub.main([NAME, "--mirror", str(tmp_path)]) == 11
    assert hub.main([]) == 2
    assert hub.main([NAME, "--frobnicate"]) == 2
    assert hub.main([NAME, "--revision", COMMIT, "--to", "/proc/none/x"]) == 28
    assert capsys.readouterr().err.count("next:") == 4


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("note", [None, "{", "[]", '{"files": 1}'])
def test_a_folder_that_is_not_ours_is_left_as_it_is_until_told(server, target, note):
    part = f".{SHARDS[0]}.0123456789ab.part"
    write_files(target, {"config.json": "my own fine-tune", part: "mine too", "sparkforge-model.json": note})
    before = contents(target)
    with pytest.raises(errors.StorageError, match="--replace"):
        hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert contents(target) == before
    assert server.downloads() == []
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target, replace=True)
    assert all((target / name).read_bytes() == server.files[name] for name in READ)
    assert (target / f".{SHARDS[0]}.0123456789ab.part").read_text() == "mine too"


def test_the_folder_of_another_model_is_left_as_it_is(server, target):
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    note = json.loads((target / "sparkforge-model.json").read_text())
    (target / "sparkforge-model.json").write_text(json.dumps(note | {"repository": "somebody/gpt-oss-120b"}))
    (target / "config.json").write_text("{}")
    with pytest.raises(errors.StorageError, match="it holds somebody/gpt-oss-120b"):
        hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert (target / "config.json").read_text() == "{}"


def changed_revision(server):
    server.files = server.listed = {**server.files, SHARDS[1]: hub_server.shard("b", 300_000, b"next")}
    server.files["special_tokens_map.json"] = b"{}"
    del server.files["chat_template.jinja"]


@pytest.mark.parametrize("fault", ["a damaged shard", "a lost shard", "another model"])
def test_a_source_with_a_fault_changes_nothing_in_a_folder_of_ours(server, target, fault):
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    (target / "README.mine").write_text("notes")
    before = contents(target)
    changed_revision(server)
    server.listed = dict(server.files)
    if fault == "a damaged shard":
        server.files = {**server.files, SHARDS[1]: server.files[SHARDS[1]][:-1] + b"?"}
    elif fault == "a lost shard":
        del server.listed[SHARDS[0]]
    else:
        server.listed = server.files = {**server.files, "config.json": b'{"model_type": "unknown"}'}
    with pytest.raises((errors.IntegrityError, errors.InputError)):
        hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert contents(target) == before


def test_a_new_revision_replaces_the_files_of_the_old_one_and_no_others(server, target):
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    (target / "README.mine").write_text("notes")
    changed_revision(server)
    server.asked.clear()
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert sorted(name for name, _ in server.downloads()) == [SHARDS[1], "special_tokens_map.json"]
    assert (target / SHARDS[1]).read_bytes() == server.files[SHARDS[1]]
    assert not (target / "chat_template.jinja").exists()
    assert (target / "README.mine").read_text() == "notes"
    assert not (target / ".sparkforge-partial").exists()


def test_a_link_to_a_folder_stays_a_link(server, target, tmp_path):
    target.parent.mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    target.symlink_to(tmp_path / "disk")
    hub.fetch_checkpoint(Hub(NAME, COMMIT), target)
    assert target.is_symlink()
    assert names(tmp_path / "disk") == sorted([*READ, "sparkforge-model.json"])


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "gpt-oss-20b", "openai/gpt-oss-120b"])
def test_a_mirror_with_the_tiny_model_under_a_known_name_is_refused(tmp_path, target, name):
    files = {file: data for file, data in hub_server.checkpoint().items() if "/" not in file}
    tiny = write_files(tmp_path / "tiny", files)
    (tiny / "config.json").write_text(json.dumps(models.load()["tiny-gpt-oss"].config))
    with pytest.raises(errors.InputError, match=f"this checkpoint is not {name}"):
        hub.fetch_checkpoint(Mirror(tiny, name, ""), target)
    assert not target.exists()
    hub.fetch_checkpoint(Mirror(tiny, "somebody/tiny-gpt-oss", ""), target.with_name("tiny-gpt-oss"))


def test_an_unknown_repository_without_a_revision_is_resolved_recorded_and_then_kept(server, target, capsys):
    server.repository = "somebody/gpt-oss"
    hub.fetch_and_report("somebody/gpt-oss", "", str(target), "")
    printed = capsys.readouterr().err
    assert COMMIT in printed
    assert "no revision of somebody/gpt-oss is pinned" in printed
    assert json.loads((target / "sparkforge-model.json").read_text())["revision"] == COMMIT
    server.asked.clear()
    hub.fetch_and_report("somebody/gpt-oss", "", str(target), "")
    assert [revision for kind, revision, _ in server.asked if kind == "info"] == [COMMIT]


def test_a_recipes_draft_is_fetched_though_no_family_describes_it_and_another_model_is_not(server, target, capsys):
    server.repository = draft = models.load()["gpt-oss-120b"].drafts["eagle3"].repository
    server.listed = server.files = {**server.files, "config.json": b'{"model_type": "llama", "vocab_size": 32000}'}
    hub.fetch_and_report(draft, "", str(target), "")
    assert "./inv up gpt-oss-120b -- --speculative-config=" in capsys.readouterr().err
    server.repository = "somebody/llama"
    with pytest.raises(errors.InputError, match="has an unknown architecture"):
        hub.fetch_and_report("somebody/llama", "", str(target.with_name("llama")), "")


def test_a_hub_that_has_no_checkpoint_names_no_commit_or_sends_more_than_it_says_is_refused(server, target):
    server.commit = "main"
    with pytest.raises(errors.NetworkError, match="names no commit"):
        Hub(NAME, "main")
    server.commit = COMMIT
    server.listed = dict(server.files)
    server.files = {**server.files, SHARDS[0]: server.files[SHARDS[0]] + bytes(30_000_000)}
    with pytest.raises((errors.IntegrityError, errors.NetworkError)):
        hub.fetch_checkpoint(Hub(NAME, "main"), target)
    assert not target.exists()
    server.listed = {"README.md": b"x"}
    with pytest.raises(errors.InputError, match="not a safetensors checkpoint"):
        hub.fetch_checkpoint(Hub(NAME, "main"), target)
