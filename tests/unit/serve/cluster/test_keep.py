"""What starts a cluster again, and what does not: ends of a head and of replicas, failures, and somebody's wish."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from sparkforge.core.errors import NetworkError, ServerError
from sparkforge.core.files import locked
from sparkforge.serve import record, restarts
from sparkforge.serve.cluster import keep, node, start, watch
from sparkforge.serve.cluster.config import ClusterConfig

RUNS, STOPPED = {"state": "running"}, {"state": "stopped"}
DIED = {"state": "ended", "why": "node spark2: signal 9 ended its server", "asked": False}
WISHED = {"state": "ended", "why": "node spark2: it was stopped", "asked": True}
SILENT = NetworkError("spark2 cannot be reached by ssh", "No route to host", "ssh spark2 true")


@dataclass
class Stage:
    """What nodes answer, by name and one after the other (the last again and again), and what is done with them."""

    config: ClusterConfig
    answers: dict[str, list[Any]] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)

    def ask(self, _config, node, action, _seconds, **_more):
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
def stage(healthy, monkeypatch):
    stage = Stage(healthy.config)
    monkeypatch.setattr(start, "ask", stage.ask)
    monkeypatch.setattr(start, "up", stage.up)
    monkeypatch.setattr(start, "down", lambda _config: stage.actions.append("down"))
    monkeypatch.setattr(start, "renew", lambda _config, node: stage.actions.append(f"renew {node.name}"))
    monkeypatch.setattr(time, "sleep", stage.pauses.append)
    return stage


def note():
    return json.loads(keep._note_path().read_text())


def test_a_dead_part_ends_what_is_left_and_starts_all_after_a_pause(stage):
    stage.answers["spark"] = [RUNS, DIED, RUNS, STOPPED]
    keep.keep(stage.config)
    assert stage.actions == ["down", "up"]
    assert restarts.FIRST_SECONDS - 0.5 < stage.pauses[1] <= restarts.FIRST_SECONDS
    assert note() == {"state": "watching", "why": f"started again after: {DIED['why']}", "failures": 1}


@pytest.mark.parametrize("wish", [WISHED, STOPPED], ids=["stopped", "down"])
def test_an_end_that_somebody_asked_for_starts_nothing(stage, wish):
    stage.answers["spark"] = [RUNS, wish]
    keep.keep(stage.config)
    assert stage.actions == []


def test_three_failures_within_an_hour_end_it_with_the_last_reason(stage):
    stage.answers["spark"] = [DIED]
    with pytest.raises(ServerError, match="too often") as caught:
        keep.keep(stage.config)
    assert stage.actions == ["down", "up"] * (restarts.MOST - 1)
    assert (caught.value.code, caught.value.why.endswith(DIED["why"])) == ("server.restarts", True)


def test_a_start_that_fails_counts_as_a_failure_and_the_next_pause_is_longer(stage):
    stage.answers["spark"] = [DIED, RUNS, STOPPED]
    stage.failing = ["no memory"]
    keep.keep(stage.config)
    assert stage.actions == ["down", "up"] * 2
    assert max(stage.pauses) == pytest.approx(restarts.FIRST_SECONDS * restarts.FACTOR, abs=0.5)
    assert note()["why"] == "started again after: it did not start: no memory"


def test_a_node_that_restarts_is_waited_for_and_is_no_failure(stage):
    stage.answers.update(spark=[DIED, RUNS, RUNS, RUNS, STOPPED], spark2=[SILENT, SILENT, RUNS])
    keep.keep(stage.config)
    assert stage.actions == ["down", "up"]
    assert note()["failures"] == 1


def test_a_head_that_does_not_answer_may_still_serve(stage):
    stage.answers["spark"] = [SILENT, SILENT, STOPPED]
    keep.keep(stage.config)
    assert stage.actions == []


def test_of_replicas_only_the_one_that_ended_is_started_again(stage):
    changes = {"mode": "replicas", "tensor": 1, "key_file": "/key"}
    stage.config = stage.config.model_copy(update=changes)
    stage.answers.update(
        spark=[RUNS, RUNS, RUNS, STOPPED], spark2=[RUNS, DIED, RUNS, STOPPED], balancer=[RUNS, STOPPED]
    )
    keep.keep(stage.config)
    assert stage.actions == ["renew spark2"]


def test_a_replica_is_started_again_while_another_ones_machine_is_gone(stage, monkeypatch):
    changes = {"mode": "replicas", "tensor": 1, "key_file": "/key"}
    stage.config = stage.config.model_copy(update=changes)
    stage.answers.update(spark=[RUNS, SILENT], spark2=[RUNS, DIED], balancer=[RUNS])

    def renew(_config, node):
        stage.actions.append(f"renew {node.name}")
        stage.answers.update(spark=[STOPPED], spark2=[STOPPED], balancer=[STOPPED])

    monkeypatch.setattr(start, "renew", renew)
    monkeypatch.setattr(keep, "RETURN_SECONDS", 0)  # who waits for the machine that is gone gives up
    keep.keep(stage.config)
    assert stage.actions == ["renew spark2"]


def test_who_gave_up_says_so_and_one_that_is_gone_does_not_count(stage, monkeypatch):
    assert keep.state()["state"] == "off"
    stage.answers["spark"] = [DIED]
    argument = stage.config.model_dump_json(by_alias=True)
    assert keep.main(argument) == ServerError.exit_code
    assert keep.state()["state"] == "gave up"
    assert "3 times within 60 min" in keep.state()["why"]
    keep.refuse_second()  # a start, which may be without a keeper
    assert keep.state()["state"] == "off"
    keep._note("watching", "spark", ())
    assert keep.state()["state"] == "off"  # nobody holds the lock


def test_a_second_cluster_is_refused_while_one_is_kept():
    keep.refuse_second()
    with locked(keep._lock_path(), keep.PURPOSE), pytest.raises(ServerError, match="is kept"):
        keep.refuse_second()


@pytest.mark.slow
def test_it_is_started_and_ended_with_what_it_asks(stage, tmp_path, monkeypatch):
    """A program in place of `ssh` says that the head's part died, and never answers again."""
    monkeypatch.undo()
    ssh = tmp_path / "ssh"
    ssh.write_text(f"""#!/bin/sh
mkdir {tmp_path}/first 2> /dev/null && exec echo '{json.dumps(DIED)}'
echo $$ > {tmp_path}/asked
exec sleep 1000
""")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path))
    nodes = [node.model_copy(update={"ssh": f"n{number}"}) for number, node in enumerate(stage.config.nodes)]
    pid = keep.begin(stage.config.model_copy(update={"nodes": tuple(nodes)}))
    assert keep.running() == pid
    deadline = time.monotonic() + 20
    while not (tmp_path / "asked").exists() or not (tmp_path / "asked").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    began = time.monotonic()
    keep.end()
    assert time.monotonic() - began < 20  # and not what a question may take
    assert keep.running() is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "asked").read_text()), 0)


def test_a_node_tells_a_wish_from_a_death(healthy):
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    record.write(record.Server(over.pid, 1.0, "127.0.0.1", 8000, "m", "m", "embedded", "log"))
    config = healthy.config.model_copy(update={"device": "embedded"})
    request = node.NodeRequest(action="status", name="spark", config=config)
    assert node.answer(request)["asked"] is False
    for why, asked in ((watch.STOPPED, True), (watch.ORPHANED, False), ("its connection broke", False)):
        node.end_path().write_text(json.dumps({"node": "spark2", "why": why}))
        assert node.answer(request) | {"left": 0} == {
            "state": "ended", "why": f"node spark2: {why}", "asked": asked, "left": 0,
        }  # fmt: skip
    node.end_path().unlink()
    for asked in (True, False):
        end = {"pid": over.pid, "code": 0, "asked": asked, "time": time.time()}
        record.end_path().write_text(json.dumps(end))
        assert node.answer(request)["asked"] is asked
