"""`./inv list`, `rm` and `run`: the models of this machine, in its folders and in a cache in Hugging Face's layout."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import misbehaving
import pytest
from servers import recorded

from sparkforge.cli import program, serve
from sparkforge.core.files import locked
from sparkforge.serve import record

CONFIG = json.dumps({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}})
COMMITS = ("c1", "c2")


@pytest.fixture(autouse=True)
def models(no_models, tmp_path, monkeypatch):
    """A fetched model, one of the same name in the hub's cache, and a cached model whose two snapshots share blobs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    fetched = tmp_path / "checkout/models/gpt-oss-120b"
    fetched.mkdir(parents=True)
    (tmp_path / "checkout/docker-compose.yml").touch()  # commands are named as on a host
    (fetched / "config.json").write_text(CONFIG)
    (fetched / "model.safetensors").write_bytes(bytes(3_000_000))
    hub = tmp_path / "huggingface/hub/models--someone--gpt-oss-20b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "blobs/weights").write_bytes(bytes(20_000_000))
    (hub / "blobs/config").write_text(CONFIG)
    for commit in COMMITS:
        (hub / "snapshots" / commit).mkdir(parents=True)
        for name, blob in (("config.json", "config"), ("model.safetensors", "weights")):
            (hub / "snapshots" / commit / name).symlink_to(Path("../../blobs") / blob)
    return {"fetched": fetched, "hub": hub}


@pytest.fixture
def inv(capsys):
    def run(*arguments):
        code = program.main(arguments)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)

    return run


@pytest.fixture
def user():
    started = []

    def start(*arguments, cwd=None):
        program = [sys.executable, "-c", "print('', flush=True); input()", *arguments]
        process = subprocess.Popen(program, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.communicate(b"\n")


def test_the_list_has_each_model_once_with_its_own_bytes(inv, models):
    listed = {model["name"]: model for model in json.loads(inv("list", "--json").stdout)["models"]}
    assert list(listed) == ["gpt-oss-120b", "someone/gpt-oss-20b"]
    assert 3_000_000 < listed["gpt-oss-120b"]["bytes"] < 3_001_000
    assert 20_000_000 < listed["someone/gpt-oss-20b"]["bytes"] < 20_001_000  # a blob of two snapshots counts once
    assert {model["family"] for model in listed.values()} == {"gpt-oss"}
    assert listed["someone/gpt-oss-20b"]["folder"] == str(models["hub"])
    shown = inv("list")
    assert "someone/gpt-oss-20b     0.02 GB  gpt-oss" in shown.stdout
    assert "2 models, 0.02 GB" in shown.stderr


def test_unfinished_fetches_and_foreign_folders_are_distinguished(inv, models):
    (models["fetched"].parent / ".big.sparkforge-partial").mkdir()
    (models["fetched"].parent / "notes").mkdir()
    other = models["hub"].with_name("models--them--other") / "snapshots/c1"
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"model_type": "another"}')
    (models["hub"].with_name("datasets--them--data")).mkdir()
    families = {model["name"]: model["family"] for model in json.loads(inv("list", "--json").stdout)["models"]}
    assert families[".big.sparkforge-partial"] == "-"
    assert families["them/other"] == "unknown"
    assert len(families) == 4


@pytest.mark.parametrize("name", ["someone/gpt-oss-20b", "gpt-oss-20b", "FOLDER"])
def test_rm_removes_the_whole_of_a_model_and_nothing_else(inv, models, name):
    left = models["hub"].with_name(".models--them--old.77.sparkforge-removed")  # by a removal that was killed
    left.mkdir()
    (left / "weights").write_text("many")
    assert len(json.loads(inv("list", "--json").stdout)["models"]) == 2
    removed = inv("rm", str(models["hub"]) if name == "FOLDER" else name, "--yes")
    assert removed.returncode == 0, removed.stderr
    assert "removed someone/gpt-oss-20b: 0.02 GB" in removed.stderr
    assert [path.name for path in models["hub"].parent.iterdir()] == [".locks"]
    assert (models["fetched"] / "model.safetensors").is_file()


def test_rm_asks_and_without_a_terminal_names_the_option(inv, models):
    refused = inv("rm", "gpt-oss-20b")
    assert refused.returncode == 2
    assert "next: ./inv rm gpt-oss-20b --yes" in refused.stderr
    assert models["hub"].is_dir()


def test_rm_leaves_what_a_fetch_writes_or_our_server_serves(inv, models):
    with locked(models["fetched"].parent / ".gpt-oss-120b.lock", "fetch gpt-oss-120b"):
        refused = inv("rm", "gpt-oss-120b", "--yes")
    assert (refused.returncode, "another Sparkforge command" in refused.stderr) == (28, True)
    record.write(recorded(8123, model=str(models["fetched"]), model_id="gpt-oss-120b"))
    refused = inv("rm", "openai/gpt-oss-120b", "--yes")
    assert refused.returncode == 28
    for words in ("gpt-oss-120b is in use", "http://127.0.0.1:8123", "next: ./inv down"):
        assert words in refused.stderr
    assert "used by http://127.0.0.1:8123" in inv("list").stdout
    assert (models["fetched"] / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "argument",
    [
        "{hub}", "{hub}/snapshots/c1/model.safetensors", "someone/gpt-oss-20b", "--model={hub}/snapshots/c1",
        "./models--someone--gpt-oss-20b/snapshots/c1",
    ],
)  # fmt: skip
def test_rm_leaves_what_another_program_was_started_with(inv, models, user, argument):
    hub = models["hub"]
    process = user(argument.format(hub=hub), cwd=hub.parent)
    refused = inv("rm", "gpt-oss-20b", "--yes")
    assert refused.returncode == 28
    assert f"pid {process.pid}" in refused.stderr
    assert hub.is_dir()


def test_rm_of_a_link_removes_the_link_alone(inv, models, tmp_path):
    models["fetched"].rename(tmp_path / "disk")
    models["fetched"].symlink_to(tmp_path / "disk")
    assert inv("rm", "gpt-oss-120b", "--yes").returncode == 0
    assert not models["fetched"].is_symlink()
    assert (tmp_path / "disk/model.safetensors").is_file()


def test_a_name_that_two_models_have_is_not_guessed(inv, models):
    twin = models["hub"].with_name("models--someone--gpt-oss-120b")
    models["hub"].rename(twin)
    refused = inv("rm", "openai/gpt-oss-120b", "--yes")
    assert refused.returncode == 2
    assert str(twin) in refused.stderr
    assert inv("rm", "someone/gpt-oss-120b", "--yes").returncode == 0
    assert models["fetched"].is_dir()


@pytest.mark.parametrize("command", ["rm", "run"])
def test_an_unknown_model_gets_the_nearest_names_and_a_repository_the_pull(inv, command):
    refused = inv(command, "gpt-oss-121b")
    assert refused.returncode == 10
    assert "the nearest: gpt-oss-120b" in refused.stderr
    assert "next: ./inv list" in refused.stderr
    assert "next: ./inv pull someone/model" in inv("run", "someone/model", "Hello").stderr


@pytest.fixture
def talk(monkeypatch):
    """The starts of `run`, and the record of a small server that answers in place of vLLM."""
    starts = []
    with misbehaving.answering() as port:

        def started(options):
            starts.append(options)
            return recorded(port, model=options.model)

        monkeypatch.setattr(serve, "started", started)
        yield SimpleNamespace(starts=starts, port=port)


def test_run_starts_a_model_that_is_not_served_and_asks_it(inv, models, talk):
    assert "Hello" in inv("run", "openai/gpt-oss-120b", "hello", "--profile", "fast").stdout
    inv("run", "gpt-oss-20b", "hello")  # from the cache
    asked = [(str(models["fetched"]), "fast"), ("someone/gpt-oss-20b", "")]
    assert [(options.model, options.profile) for options in talk.starts] == asked


def test_run_asks_the_running_server_by_either_name_and_replaces_no_other_one(inv, models, talk):
    record.write(recorded(talk.port, model=str(models["fetched"]), model_id="gpt-oss-120b"))
    assert "Hello" in inv("run", "openai/gpt-oss-120b", "hello").stdout
    assert talk.starts == []
    refused = inv("run", "gpt-oss-20b", "hello")
    assert refused.returncode == 24
    assert "next: ./inv down && ./inv run gpt-oss-20b" in refused.stderr


def test_ps_and_the_old_name_of_pull_are_commands(inv):
    assert inv("ps", "--help").stdout == inv("status", "--help").stdout
    for name in (["model.fetch"], ["model", "fetch"]):
        assert inv(*name, "--help").stdout.startswith("Usage: ./inv pull REPOSITORY")
