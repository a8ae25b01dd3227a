"""The record of known good starts, and which of them a rollback goes back to."""

import json
import stat
from dataclasses import replace

import pytest

from sparkforge.core import errors
from sparkforge.core.redact_rules import TOKEN
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import known_good, launch, record, rollback
from sparkforge.serve.devices import embedded
from sparkforge.serve.known_good import KnownGood
from sparkforge.serve.plan import StartPlan

PLAN = StartPlan(EMBEDDED, key_file=None)
START = KnownGood(1.0, "docker", "spark", "gpt-oss-120b", "safe", 8000, image="sha256:a")


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def starts(*images):
    """Record starts of these images, the last one newest."""
    for number, image in enumerate(images, 1):
        known_good.add(replace(START, time=float(number), image=image))
    return known_good.read()


def test_the_newest_is_first_and_the_same_start_is_there_once(state):
    starts("a", "b", "a")
    assert [(start.image, start.time) for start in known_good.read()] == [("a", 3.0), ("b", 2.0)]
    assert stat.S_IMODE((state / "known-good.json").stat().st_mode) == 0o600
    known_good.add(replace(START, time=9.0, image="a", profile="fast"))
    assert [start.profile for start in known_good.read()] == ["fast", "safe", "safe"]


def test_the_history_is_bounded_and_names_its_images():
    starts(*(f"image-{number}" for number in range(known_good.HISTORY + 3)))
    read = known_good.read()
    assert len(read) == known_good.HISTORY
    assert set(known_good.images()) == {start.image for start in read}


def test_a_damaged_record_is_named_and_not_overwritten(state, capsys):
    state.mkdir(mode=0o700)
    (state / "known-good.json").touch(mode=0o600)
    (state / "known-good.json").write_text("{")
    with pytest.raises(errors.StorageError, match="cannot read the known good starts"):
        known_good.read()
    known_good.remember(START)
    assert "is not recorded as known good" in capsys.readouterr().err
    assert (state / "known-good.json").read_text() == "{"


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_the_old_or_the_new_record(kit, state):
    starts("a")
    number = 0
    while kit.killed_before(number, lambda: known_good.add(replace(START, time=2.0, image="b"))):
        assert [start.image for start in known_good.read()] in (["a"], ["b", "a"])
        number += 1
    assert number > 3
    assert known_good.read()[0].image == "b"


PROJECT = {
    "services": {
        "vllm": {
            "image": "sparkforge/vllm:spark",
            "environment": {
                "SPARKFORGE_SERVE_PROFILE": "safe",
                "SPARKFORGE_API_KEY": "/home/me/key",
                "MY_TOKEN": "abcdefgh",
                "OTHER": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
                "EMPTY_TOKEN": "",
            },
        }
    }
}


def test_secrets_are_left_out_and_come_from_the_settings_of_now():
    kept = known_good.without_secrets(PROJECT)
    environment = kept["services"]["vllm"]["environment"]
    assert "abcdefgh" not in json.dumps(kept)
    assert "hf_A" not in json.dumps(kept)
    assert environment["SPARKFORGE_SERVE_PROFILE"] == "safe"
    assert environment["SPARKFORGE_API_KEY"] == "/home/me/key"  # a file's path
    assert (environment["MY_TOKEN"], environment["OTHER"], environment["EMPTY_TOKEN"]) == (TOKEN, TOKEN, "")
    assert known_good.with_secrets(kept, PROJECT) == PROJECT
    with pytest.raises(errors.UsageError, match="MY_TOKEN has no value"):
        known_good.with_secrets(kept, {"services": {"vllm": {"environment": {"OTHER": "x"}}}})


def test_a_setting_with_flags_is_no_secret():
    environment = {"VLLM_ARGS": "--max-num-seqs 8 --max-num-batched-tokens=4096", "MODEL_URL": "http://me:pass@host/"}
    kept = known_good.without_secrets({"services": {"vllm": {"environment": environment}}})
    assert kept["services"]["vllm"]["environment"] == {**environment, "MODEL_URL": TOKEN}


def serve(monkeypatch, proved):
    """Have a server run that was proved at that time."""
    server = record.Server(1, 1.0, "127.0.0.1", 8000, "m", "m", "docker", "", proved=proved)
    monkeypatch.setattr(record.Server, "alive", True)
    return server


def test_without_a_start_there_is_nothing_to_go_back_to():
    with pytest.raises(errors.ServerError, match="there is no known good start"):
        rollback._choose([], 0, None)
    with pytest.raises(errors.ServerError, match="no known good start 2"):
        rollback._choose(starts("a"), 2, None)


def test_after_an_upgrade_that_failed_the_newest_known_good_start_comes_back(monkeypatch):
    read = starts("a", "b")
    assert rollback._choose(read, 0, None).image == "b"
    assert rollback._choose(read, 0, serve(monkeypatch, 7.0)).image == "b"  # what runs was never recorded
    assert rollback._choose(read, 2, None).image == "a"


def test_from_a_known_good_server_it_is_the_one_before_unless_a_newer_image_waits(monkeypatch):
    read = starts("a", "b")
    server = serve(monkeypatch, 2.0)
    monkeypatch.setattr(rollback, "_tagged", lambda start: "b")
    assert rollback._choose(read, 0, server).image == "a"
    monkeypatch.setattr(rollback, "_tagged", lambda start: "built-since")
    assert rollback._choose(read, 0, server).image == "b"
    monkeypatch.setattr(rollback, "_tagged", lambda start: "a")
    with pytest.raises(errors.ServerError, match="the only known good one runs"):
        rollback._choose(starts("a")[:1], 0, serve(monkeypatch, 1.0))


def test_an_interrupted_rollback_goes_on_to_the_same_start_until_one_is_good(state, capsys):
    read = starts("a", "b")
    known_good.intent_path().write_text(json.dumps({"to": read[1].identity}))
    assert rollback._choose(read, 0, None).image == "a"
    assert "a rollback was interrupted" in capsys.readouterr().err
    read = starts("c")
    assert not known_good.intent_path().exists()
    assert rollback._choose(read, 0, None).image == "c"


def test_a_rollback_of_the_embedded_device_needs_the_locks_of_then():
    start = replace(START, image="", device="embedded", stack="embedded", environment="0" * 64, plan=PLAN)
    known_good.add(replace(start, revision="abc", port=1))
    with pytest.raises(errors.ServerError, match="other locks") as caught:
        rollback.plan()
    assert caught.value.fix == "git checkout abc, then ./inv rollback"


def test_an_embedded_start_of_an_older_version_is_left_out():
    """It has `settings` and no plan, so nothing says what to start; one of a container is read as before."""
    starts("a")
    document = json.loads(known_good.record_path().read_text())
    (newer,) = document["starts"]
    older = {**newer, "image": "", "device": "embedded", "model": "/m", "settings": {"arguments": []}}
    del older["plan"]
    known_good.record_path().write_text(json.dumps({"schema": 1, "starts": [older, {**newer, "settings": {}}]}))
    assert [start.image for start in known_good.read()] == ["a"]


def test_a_rollback_to_a_profile_that_is_gone_is_refused_and_changes_nothing(state, monkeypatch):
    inputs = {"lock": "1"}
    monkeypatch.setattr(rollback.environments, "inputs", lambda *_args: inputs)
    monkeypatch.setattr(rollback.launch, "stop", lambda: pytest.fail("the server that runs was ended"))
    start = replace(START, image="", stack="embedded", profile="gone", environment=known_good.hashed(inputs), plan=PLAN)
    known_good.add(start)
    before = (state / "known-good.json").read_bytes()
    with pytest.raises(errors.ServerError, match="the profile gone is gone") as caught:
        rollback.plan()
    assert caught.value.code == "server.rollback"
    assert "there are safe" in caught.value.why
    assert "nothing was changed" in caught.value.why
    assert caught.value.fix == "./inv rollback --list"
    assert (state / "known-good.json").read_bytes() == before
    assert not known_good.intent_path().exists()
    known_good.add(replace(start, profile="safe", time=2.0))  # it is there, and not for this device any more
    with pytest.raises(errors.ServerError, match="the profile safe is gone"):
        rollback.plan()


def test_a_record_that_others_may_write_is_not_believed(state):
    starts("a")
    (state / "known-good.json").chmod(0o666)
    with pytest.raises(errors.StorageError, match="is not believed"):
        known_good.read()


def test_a_rollback_of_the_embedded_device_is_the_same_start(monkeypatch, tmp_path, state):
    state.mkdir(mode=0o700)
    (tmp_path / "key").write_text("sesame")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setattr(embedded.environments, "stamp", lambda _environment: {"lock": "1"})
    plan = StartPlan(EMBEDDED, port=8001, host="::1", key_file=str(tmp_path / "key"), flags=("--seed=1",))
    server = record.Server(1, 1.0, "::1", 8001, "m", "m", EMBEDDED, "", profile="embedded", proved=1.0)
    embedded.Embedded(plan).remember(server)
    (start,) = known_good.read()
    assert "sesame" not in known_good.record_path().read_text()
    plans = []
    monkeypatch.setattr(rollback.device, "run", lambda device: plans.append(device.plan) or server)
    assert rollback.perform(rollback.RollbackPlan(start, (), serves=False)) == server
    wanted = replace(plan, stack="embedded", profile="embedded", key="sesame")
    assert plans == [wanted]


def test_two_rollbacks_at_once_exclude_each_other(monkeypatch, state):
    plan = rollback.RollbackPlan(replace(START, image="", plan=PLAN), (), serves=False)
    server = record.Server(0, 0.0, "127.0.0.1", 8000, "", "", "embedded", "", proved=7.0)
    finished = []

    def second(*_args):
        with pytest.raises(errors.StorageError, match="cannot start a server") as busy:
            rollback.perform(plan)
        assert "no server runs" not in busy.value.what
        finished.append(len(finished))
        return server

    monkeypatch.setattr(rollback.record, "leftovers", lambda: second() and [])  # before anything is stopped
    monkeypatch.setattr(rollback.device, "run", second)
    assert rollback.perform(plan) == server
    assert len(finished) >= 2


def test_what_a_killed_rollback_left_is_gone_at_the_next_start(state):
    state.mkdir(mode=0o700)
    known_good.project_path().write_text("{}")  # with the values that the record leaves out
    with launch.starting():
        assert not known_good.project_path().exists()
