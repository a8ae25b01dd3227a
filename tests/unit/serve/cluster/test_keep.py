"""Restarts of a cluster: after the head's part has ended, after failures, and none after a requested end."""

import json
import os
import subprocess
import sys
import time

import pytest
from programs import write_program
from servers import recorded
from waiting import wait_for

from sparkforge.core import paths
from sparkforge.core.errors import NetworkError, ServerError
from sparkforge.core.files import locked
from sparkforge.serve import record, restarts
from sparkforge.serve.cluster import node, start, watch

RUNS, STOPPED = {"state": "running"}, {"state": "stopped"}
DIED = {"state": "ended", "why": "node spark2: signal 9 ended its server", "asked": False}
WISHED = {"state": "ended", "why": "node spark2: it was stopped", "asked": True}
SILENT = NetworkError("spark2 cannot be reached by ssh", "No route to host", "ssh spark2 true")


class Stage:
    """Nodes with prepared answers (the last one repeats), and a record of the keeper's actions and pauses."""

    def __init__(self, config, pauses):
        self.config, self.pauses, self.answers = config, pauses, {}
        self.actions, self.failing = [], []

    def ask(self, _config, node, action):
        assert action == "status"
        answers = self.answers.get(node.name, [RUNS])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def up(self, _config):
        self.actions.append("up")
        assert all(answer is not SILENT for answers in self.answers.values() for answer in answers)
        if self.failing:
            raise ServerError("it did not start", self.failing.pop(), "x")


@pytest.fixture
def stage(healthy, pauses, monkeypatch):
    stage = Stage(healthy.config, pauses)
    monkeypatch.setattr(start, "ask", stage.ask)
    monkeypatch.setattr(start, "up", stage.up)
    monkeypatch.setattr(start, "down", lambda _config: stage.actions.append("down"))
    return stage


def note():
    return json.loads((paths.state() / start.NOTE).read_text())


AGAIN, SECOND_PAUSE = ["down", "up"], restarts.FIRST_SECONDS * restarts.FACTOR


@pytest.mark.parametrize(
    ("answers", "failing", "actions", "pause", "why"),
    [
        ({"spark": [RUNS, DIED, RUNS, STOPPED]}, [], AGAIN, restarts.FIRST_SECONDS, DIED["why"]),
        ({"spark": [RUNS, WISHED]}, [], [], None, None),
        ({"spark": [RUNS, STOPPED]}, [], [], None, None),
        ({"spark": [SILENT, SILENT, STOPPED]}, [], [], None, None),  # a silent head may still serve
        # A failed start also counts as a failure.
        ({"spark": [DIED, RUNS, STOPPED]}, ["no memory"], AGAIN * 2, SECOND_PAUSE, "it did not start: no memory"),
        # Waiting for a node that restarts does not count as a failure.
        (
            {"spark": [DIED, RUNS, RUNS, RUNS, STOPPED], "spark2": [SILENT, SILENT, RUNS]},
            [], AGAIN, restarts.FIRST_SECONDS, DIED["why"],
        ),
    ],
    ids=["died", "wish", "down", "silent", "start-fails", "restarts"],
)  # fmt: skip
def test_an_unrequested_end_restarts_all_nodes_after_a_pause(stage, answers, failing, actions, pause, why):
    stage.answers.update(answers)
    stage.failing = failing
    failures = len(failing) + 1
    start.keep(stage.config)
    assert stage.actions == actions
    if why:
        pauses = [seconds for seconds in stage.pauses if seconds != start.LOOK_SECONDS]
        assert pauses[-1] == pytest.approx(pause, abs=0.5)
        assert note() == {"state": "watching", "why": f"started again after: {why}", "failures": failures}


def test_after_three_recent_failures_the_keeper_gives_up_with_a_message(stage):
    assert start.keeper_state()["state"] == "off"
    stage.answers["spark"] = [DIED]
    argument = stage.config.model_dump_json(by_alias=True)
    assert start.main(argument) == ServerError.exit_code
    assert stage.actions == AGAIN * (restarts.MAX_FAILURES - 1)
    assert start.keeper_state()["state"] == "gave up"
    assert "3 times within 60 min" in start.keeper_state()["why"]
    assert start.keeper_state()["why"].endswith(DIED["why"])
    start.refuse_second()  # does not raise, because no keeper runs
    assert start.keeper_state()["state"] == "off"
    start._note("watching", "spark", ())
    assert start.keeper_state()["state"] == "off"  # nobody holds the lock


@pytest.mark.slow
def test_it_is_started_and_ended_with_what_it_asks(stage, tmp_path, monkeypatch):
    """A program in place of `ssh` answers once that the head's part died, and then hangs."""
    monkeypatch.undo()
    first = f"mkdir {tmp_path}/first 2> /dev/null && exec echo '{json.dumps(DIED)}'"
    write_program(tmp_path / "ssh", f"{first}\necho $$ > {tmp_path}/asked\nexec sleep 1000")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path))
    nodes = [node.model_copy(update={"ssh": f"n{number}"}) for number, node in enumerate(stage.config.nodes)]
    pid = start.begin_keeper(stage.config.model_copy(update={"nodes": tuple(nodes)}))
    assert start.keeper_pid() == pid
    with pytest.raises(ServerError, match="keeps a cluster"):
        start.refuse_second()
    wait_for(lambda: (tmp_path / "asked").exists() and (tmp_path / "asked").read_text())
    began = time.monotonic()
    start.end_keeper()
    assert time.monotonic() - began < 20  # it does not wait for the query's timeout
    assert start.keeper_pid() is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "asked").read_text()), 0)


@pytest.mark.slow
def test_a_keeper_that_cannot_take_its_lock_is_an_error(healthy):
    with locked(paths.state() / start.LOCK, "do something else"), pytest.raises(ServerError, match="did not start"):
        start.begin_keeper(healthy.config)
    wait_for(lambda: "[storage." in (log := (paths.state() / start.LOG).read_text()) or "Traceback" in log)
    assert "Traceback" not in (paths.state() / start.LOG).read_text()


def test_a_node_distinguishes_requested_ends_from_failures(healthy):
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    record.write(recorded(pid=over.pid))
    record.log_path().parent.mkdir(exist_ok=True)
    config = healthy.config.model_copy(update={"device": "embedded"})
    request = node.NodeRequest(action="status", name="spark", config=config)
    assert node.answer(request)["asked"] is False
    for why, asked in ((watch.STOPPED, True), (watch.ORPHANED, False), ("its connection broke", False)):
        record.log_path().write_text(watch.MESSAGE.format(node="spark2", why=why))
        assert node.answer(request) | {"left": 0} == {
            "state": "ended", "why": f"node spark2: {why}", "asked": asked, "left": 0,
        }  # fmt: skip
    record.log_path().unlink()
    for asked in (True, False):
        end = {"pid": over.pid, "code": 0, "asked": asked, "time": time.time()}
        record.end_path().write_text(json.dumps(end))
        assert node.answer(request)["asked"] is asked
