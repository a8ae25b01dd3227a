"""Advice in a container names the Compose files that created it, with the environment from the real Compose."""

import json
import os

import pytest

from sparkforge.core import paths
from sparkforge.core.paths import ROOT

DEV = "docker-compose.dev.yml"
OWN = "services: {vllm: {environment: {SPARKFORGE_COMPOSE_FILE_9: mine.yml}}}\n"
SILENT = "services: {vllm: {environment: {OMP_NUM_THREADS: 1}}}\n"


@pytest.mark.parametrize(
    ("files", "service", "named"),
    [
        ("docker-compose.yml", "vllm", ""),
        ("docker-compose.yml docker-compose.cluster.yml", "vllm", "docker-compose.yml docker-compose.cluster.yml"),
        ("docker-compose.yml mine.yml", "vllm", "docker-compose.yml mine.yml"),
        ("docker-compose.yml silent.yml", "vllm", ""),
        (DEV, "serve", DEV),
        (f"{DEV} docker-compose.dev.cpu.yml", "serve", f"{DEV} docker-compose.dev.cpu.yml"),
    ],
)
def test_each_file_that_was_given_by_f_is_named(engine, tmp_path, monkeypatch, files, service, named):
    (tmp_path / "mine.yml").write_text(OWN)
    (tmp_path / "silent.yml").write_text(SILENT)
    paths_of = [ROOT / name if (ROOT / name).exists() else tmp_path / name for name in files.split()]
    words = [word for path in paths_of for word in ("-f", path)]
    resolved = engine.docker("compose", *words, "--profile", "*", "config", "--format", "json")
    variables = json.loads(resolved)["services"][service]["environment"]
    assert not variables["SPARKFORGE_COMPOSE_FILE"], "Compose passes no -f on; if it does now, the rest is needless"
    for name, value in variables.items():
        if name.startswith(paths.COMPOSE_FILES) or name == paths.COMPOSE_PROFILE:
            monkeypatch.setenv(name, value)
    options = "".join(f"-f {name} " for name in named.split()) + ("--profile serve " if service == "serve" else "")
    assert paths.where_it_runs("docker compose up -d", tmp_path) == f"docker compose {options}up -d   # on the host"


def test_files_of_composes_own_variable_are_named_as_they_stand_there(engine, tmp_path, monkeypatch):
    (tmp_path / "silent.yml").write_text(SILENT)
    files = os.pathsep.join((str(ROOT / "docker-compose.yml"), str(tmp_path / "silent.yml")))
    resolved = engine.docker("compose", "config", "--format", "json", env={"COMPOSE_FILE": files})
    variables = json.loads(resolved)["services"]["vllm"]["environment"]
    assert variables["SPARKFORGE_COMPOSE_FILE"] == files
