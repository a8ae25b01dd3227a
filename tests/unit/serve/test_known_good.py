"""The record of known good starts, and the choice and course of a rollback."""

import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from servers import recorded

from sparkforge import environments, pins
from sparkforge.core import errors, manifest, paths
from sparkforge.core.process import started_at
from sparkforge.environments import Environment
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import known_good, record
from sparkforge.serve.devices import choose, device, in_environment
from sparkforge.serve.known_good import KnownGood
from sparkforge.serve.record import StartPlan

PLAN = StartPlan(EMBEDDED, stack="embedded", profile="embedded", key_file=None)
START = KnownGood(1.0, PLAN, "tiny-gpt-oss", revision="abc", environment="0" * 64)
INPUTS = environments.inputs(Environment(EMBEDDED), pins.load())


@pytest.fixture
def state():
    return paths.state()


def starts(*profiles):
    for number, port in enumerate(profiles, 1):
        environment = known_good.hashed(INPUTS)
        known_good.add(replace(START, time=float(number), plan=replace(PLAN, port=port), environment=environment))


def server_of(port, proved):
    return recorded(port, profile="embedded", proved=proved)


def choose_and_return(plan):
    return lambda: server_of(plan.port, 9.0)


def refused(message, starter=choose_and_return, number=0):
    with pytest.raises(errors.ServerError, match=message, check=lambda error: error.code == "server.rollback") as error:
        known_good.roll_back(starter, number)
    return error.value


def test_the_newest_is_first_the_same_start_is_there_once_and_the_history_is_bounded(state):
    starts(1, 2, 1)
    assert [(start.plan.port, start.time) for start in known_good.read()] == [(1, 3.0), (2, 2.0)]
    assert stat.S_IMODE((state / "known-good.json").stat().st_mode) == 0o600
    known_good.add(replace(START, time=9.0, plan=replace(PLAN, image="sha256:a")))
    starts(*range(1, known_good.HISTORY + 4))
    assert len(known_good.read()) == known_good.HISTORY


@pytest.mark.parametrize(
    ("text", "mode", "message"), [("{", 0o600, "cannot read the known good starts"), ("{}", 0o666, "is not trusted")]
)
def test_a_record_that_cannot_be_trusted_is_named_and_not_overwritten(state, text, mode, message):
    path = state / "known-good.json"
    path.write_text(text)
    path.chmod(mode)
    for use in (known_good.read, lambda: known_good.add(START)):
        with pytest.raises(errors.StorageError, match=message):
            use()
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("number", "running", "port"),
    [
        (0, None, 2),  # after a failed upgrade the newest start is restored
        (0, (3, 7.0), 2),  # the running start was never recorded
        (0, (2, 2.0), 1),  # the newest runs
        (1, (2, 2.0), 2),  # the target already runs, and continues
    ],
)
def test_a_rollback_goes_to_the_last_good_start_before_what_runs(capsys, number, running, port):
    starts(1, 2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as server:
        if running:
            record.write(replace(server_of(*running), pid=server.pid, started=started_at(server.pid)))
        assert known_good.roll_back(choose_and_return, number, dry_run=True) is None
        assert server.poll() is None
        assert known_good.roll_back(choose_and_return, number).port == port
        stopped = server.poll() is not None
    assert stopped == bool(running and running[0] != port)
    said = capsys.readouterr().err
    assert ("port: 2, will be 1" in said) == (port == 1)
    assert ("that start, and keeps running" in said) == (bool(running) and not stopped)


def test_without_another_start_there_is_nothing_to_go_back_to():
    assert refused("there is no known good start").fix == "./inv up"
    starts(1)
    refused("no known good start 2", number=2)
    record.write(server_of(1, 1.0))
    assert "nothing was changed" in refused("there is no start to go back to").why


def fails(error):
    """Return a starter whose start raises an error."""

    def start():
        raise error

    return lambda _plan: start


def test_an_interrupted_rollback_goes_on_to_the_same_start_until_one_is_good(capsys):
    starts(1, 2)
    with pytest.raises(KeyboardInterrupt):
        known_good.roll_back(fails(KeyboardInterrupt), 2)
    assert known_good.roll_back(choose_and_return).port == 1
    assert "a rollback was interrupted" in capsys.readouterr().err
    starts(1, 2)  # a start has proved itself since
    assert known_good.roll_back(choose_and_return).port == 2


def test_a_rollback_that_lacks_something_changes_nothing(state):
    known_good.add(START)
    assert refused("of another checkout").fix.startswith("git checkout abc && ./inv rollback   # or another start: ")
    record.write(server_of(9, 9.0))
    environment = known_good.hashed(INPUTS)
    changes = ({"profile": "gone"}, "gone"), ({"model": "/gone"}, "/gone"), ({"key_file": "/gone/key"}, "/gone/key")
    for number, (change, message) in enumerate(changes, 2):
        known_good.add(replace(START, time=float(number), environment=environment, plan=replace(PLAN, **change)))
        before = (state / "known-good.json").read_bytes()
        error = refused(message, lambda plan: choose.device_for(plan, pytest.fail))
        assert "nothing was changed" in error.why
        assert (state / "known-good.json").read_bytes() == before
        assert not known_good.intent_path().exists()
        assert record.read() is not None, "the server that runs was ended"


def test_a_start_that_does_not_prove_itself_leaves_the_record():
    starts(1)
    ended = errors.ServerError("the server ended", "no kernel", "./inv doctor", code="server.start")
    error = refused("no server runs: the server ended", fails(ended))
    assert error.fix == "./inv doctor   # or another start: ./inv rollback --list"
    assert not known_good.intent_path().exists()
    assert [start.plan.port for start in known_good.read()] == [1]


def test_a_rollback_of_the_embedded_device_is_the_same_start(key_file, state):
    manifest.once(
        Environment(EMBEDDED).path, environments.STAGE, INPUTS, lambda path: path.mkdir() or manifest.Made({})
    )
    plan = StartPlan(EMBEDDED, port=8001, host="::1", key_file=str(key_file), variables={"MAX_MODEL_LEN": "64"})
    first = in_environment.Embedded(plan)
    first.remember(replace(server_of(8001, 1.0), host="::1"))
    assert "sesame" not in (state / "known-good.json").read_text()
    plans = []

    def starter(recorded):
        second = choose.device_for(recorded, pytest.fail)
        plans.append(second.plan)
        second.remember(server_of(8001, 2.0))
        return lambda: server_of(8001, 2.0)

    known_good.roll_back(starter)
    assert plans == [replace(first.plan, stack="embedded", profile="embedded")]
    assert [start.time for start in known_good.read()] == [2.0]


def test_a_full_disk_ends_no_server(capsys, state):
    class Started(device.Device):
        prepare = validate = lambda _self: None

        def start(self):
            (state / "known-good.json").mkdir()  # makes the write fail, as a full disk would
            return server_of(8000, 1.0)

        def remember(self, server):
            known_good.remember(server, self.plan, environment="")

    assert device.run(Started(PLAN)) == server_of(8000, 1.0)
    assert "is not recorded as known good" in capsys.readouterr().err
