"""Paths that users give to commands, and the state folder."""

import os
from pathlib import Path

import pytest

from sparkforge.core import paths
from sparkforge.core.errors import StorageError, UsageError
from sparkforge.doctor import doctor
from sparkforge.models import hub
from sparkforge.models.hub_source import Mirror
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan
from sparkforge.sources import offline

NOBODY = "~nobody-has-this-name/x"


@pytest.mark.parametrize("before", [None, 0o755, 0o777, 0o700])
def test_the_state_folder_is_closed_to_others(monkeypatch, tmp_path, before):
    folder = tmp_path / "a" / "state"
    monkeypatch.setenv("SPARKFORGE_STATE", str(folder))
    if before is not None:
        folder.mkdir(parents=True)
        (folder / "starts.json").touch()  # as written by a container before the first ./inv
        folder.chmod(before)
    paths.require_state()
    assert paths.secure_state() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_folder_of_other_programs_is_neither_used_nor_closed(monkeypatch, tmp_path, mode):
    """`sudo SPARKFORGE_STATE=/tmp ./inv up` once closed /tmp to all other users."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "theirs").touch()
    folder.chmod(mode)
    if mode == 0o755:  # as /var/lib: open, and with files of another user
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("SPARKFORGE_STATE", str(folder))
    with pytest.raises(StorageError, match="other programs use it") as caught:
        paths.require_state()
    assert caught.value.fix == f"SPARKFORGE_STATE={folder}/sparkforge"
    assert folder.stat().st_mode & 0o7777 == mode


def test_the_root_folder_is_no_state_folder_and_an_empty_variable_counts_as_unset(monkeypatch):
    """`SPARKFORGE_STATE= ./inv up` once wrote models and environments into the checkout."""
    monkeypatch.setenv("SPARKFORGE_STATE", "/")
    with pytest.raises(StorageError, match="cannot use the state folder /"):
        paths.require_state()
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("SPARKFORGE_STATE", "SPARKFORGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert paths.state() == paths.ROOT / ".sparkforge"
    assert paths.cache() == Path("/home/me/.cache/sparkforge")


def test_the_home_of_an_unknown_user_is_refused():
    for call in (
        lambda: doctor.gather("", NOBODY),
        lambda: doctor.gather(NOBODY, ""),
        lambda: in_environment.Embedded(StartPlan("embedded", model=NOBODY)),
        lambda: hub.fetch_checkpoint(None, Path(NOBODY)),
        lambda: Mirror(Path(NOBODY), "openai/gpt-oss-120b", ""),
        lambda: offline.use_bundle(NOBODY),
    ):
        with pytest.raises(UsageError, match="nobody-has-this-name"):
            call()


@pytest.mark.parametrize(
    ("advice", "in_an_image"),
    [
        ("./inv pull openai/gpt-oss-120b", "./inv pull openai/gpt-oss-120b   # on the host"),
        ("./inv up   # on the host", "./inv up   # on the host"),
        ("then `docker compose up -d`", "then `docker compose up -d`   # on the host"),
        ("nvidia-smi   # if that hangs too, reboot", "nvidia-smi   # if that hangs too, reboot"),
    ],
)
def test_advice_in_an_image_says_what_runs_on_the_host(tmp_path, advice, in_an_image):
    assert paths.where_it_runs(advice, tmp_path) == in_an_image
    (tmp_path / "inv").touch()
    of_host = advice.lstrip("`").startswith(("docker", "sudo")) or "`docker" in advice
    assert paths.where_it_runs(advice, tmp_path) == (in_an_image if of_host else advice)  # the image for development
    (tmp_path / "docker-compose.yml").touch()
    assert paths.where_it_runs(advice, tmp_path) == advice


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, ""),
        ({"FILE": "a.yml:my b.yml", "FILE_1": "c.yml"}, "-f a.yml -f 'my b.yml' "),
        ({"FILE_1": "d.yml", "PROFILE": "serve"}, "-f d.yml --profile serve "),
    ],
)
def test_advice_in_a_container_names_the_compose_files_that_made_it(monkeypatch, tmp_path, variables, options):
    for name, value in variables.items():
        monkeypatch.setenv(f"SPARKFORGE_COMPOSE_{name}", value)
    advice = "SPARKFORGE_MEMORY=8g docker compose up -d; then docker compose logs vllm"
    named = f"SPARKFORGE_MEMORY=8g docker compose {options}up -d; then docker compose {options}logs vllm"
    assert paths.where_it_runs(advice, tmp_path) == f"{named}   # on the host"
    advice = "docker compose -f x.yml up   # on the host"
    assert paths.where_it_runs(advice, tmp_path) == advice
