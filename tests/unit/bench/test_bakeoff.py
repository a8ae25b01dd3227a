"""A bake-off of serve profiles against a stub: ranking, interrupts, and commands that run at the same time."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest
from expected import refused

from sparkforge.bench import bakeoff
from sparkforge.core import interrupt, paths
from sparkforge.core.errors import InputError, ServerError, StorageError, UsageError
from sparkforge.core.paths import ROOT
from sparkforge.core.process import started_at
from sparkforge.image.compose import Service
from sparkforge.serve import record
from sparkforge.serve.record import Server, StartPlan

pytestmark = pytest.mark.slow  # real programs in most of them

FLAGS = {"isl": "24", "osl": "8", "conc": "1", "num_prompts": "3", "warmups": "0", "silence": "60"}
FLAGS["text"] = "persuasion-24"


@pytest.fixture(autouse=True)
def fake_compose(monkeypatch, fake_engine):
    """A fake Compose that reads stack, model and length from the variables, and a fake container with a log."""
    fake_engine.log = "RuntimeError: in the container"

    def resolve(env):
        stack = env.get("SPARKFORGE_STACK") or "spark"
        length = {"SPARKFORGE_MAX_MODEL_LEN": env.get("MAX_MODEL_LEN", "")}
        environment = {**env, **length, "SPARKFORGE_STACK": stack}
        return Service("sparkforge:1", stack, "127.0.0.1", 8000, 1, environment, "")

    monkeypatch.setattr(bakeoff.docker_compose, "resolve", resolve)


def served(process, stub, **more):
    port = urlsplit(stub.url).port
    return Server(process.pid, started_at(process.pid), "127.0.0.1", port, "m", "honest-model", "docker", "", **more)


@pytest.fixture
def starter(stub, free_port):
    """Start fake servers: a sleeping process, recorded at the stub's address; `acts` maps profiles to behaviour."""
    fake = SimpleNamespace(acts={}, more={}, started=[], processes=[], request=StartPlan("docker", port=free_port()))

    def start(request):
        assert request.trial
        fake.started.append(request.profile)
        fake.acts.get(request.profile, lambda: None)()
        process = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
        fake.processes.append(process)
        server = served(process, stub, profile=request.profile, **fake.more)
        record.write(server)
        return server

    fake.start = start
    yield fake
    for process in fake.processes:
        process.kill()
        process.wait()


def standings():
    return {row["name"]: row for row in json.loads(bakeoff.record_path().read_text())["standings"]}


def bake(starter, *names, **flags):
    bakeoff.run(names, {**FLAGS, **flags}, starter.request, starter.start)


def fails(error):
    def act(*_arguments):
        raise error

    return act


NO_START = ServerError("the server ended, before it served", "RuntimeError: no such kernel", "./inv doctor")


def test_profiles_are_ranked(starter, stub, capsys):
    starter.acts = {"fast": fails(NO_START), "long-context": lambda: vars(stub).update(logprob=-9.0)}
    bake(starter, "fast", "safe", "long-context")
    stored = json.loads((paths.state() / "bakeoff.json").read_text())
    assert stored["machine"]["processor"]
    assert "no such kernel" in standings()["fast"]["why"]
    assert "accuracy gate" in standings()["long-context"]["why"]
    assert standings()["safe"]["score"] > 0
    assert stored["settings"]["safe"]["--max-num-seqs"] == "18"
    assert record.read() is None
    assert all(process.wait(10) is not None for process in starter.processes)
    shown = capsys.readouterr()
    assert "the winner is safe: ./inv up --profile safe" in shown.err
    rows = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in (shown.out + shown.err).splitlines()]
    ranks = {row[1]: row[0] for row in rows if len(row) > 1 and row[0] in {"1", "2", "3", "-"}}
    assert ranks == {"safe": "1", "fast": "-", "long-context": "-"}


def test_an_interrupted_bake_off_leaves_no_server_and_what_was_finished(starter):
    starter.acts = {"fast": fails(KeyboardInterrupt())}
    with pytest.raises(KeyboardInterrupt):
        bake(starter, "safe", "fast", "long-context")
    assert record.read() is None
    assert all(process.wait(10) is not None for process in starter.processes)
    assert list(standings()) == ["safe"]


def test_a_running_server_is_not_ended_silently(starter):
    starter.start(StartPlan("docker", profile="mine", trial=True))
    starter.started = []
    with pytest.raises(ServerError, match="runs", check=lambda error: "--replace" in error.fix):
        bake(starter, "safe")
    assert (starter.started, starter.processes[0].poll()) == ([], None)
    bake(starter, "safe", replace=True)
    assert starter.processes[0].wait(10) is not None
    assert starter.started == ["safe"]


def test_names_are_checked_before_anything_starts(starter):
    for names in (("nothing",), (), ("safe", "nothing")):
        with pytest.raises(UsageError):
            bake(starter, *names)
    assert starter.started == []


@pytest.mark.parametrize("status", [200, 500])
def test_a_server_of_another_command_is_neither_ended_nor_ranked(starter, stub, status):
    def replace_server():
        """Act like `./inv down` and `./inv up` in another terminal."""
        stub.status = status
        starter.processes[-1].kill()
        starter.processes.append(subprocess.Popen(["/bin/sleep", "600"], start_new_session=True))
        record.write(served(starter.processes[-1], stub))

    starter.acts = {"fast": lambda: vars(stub).update(at_load=replace_server)}
    with pytest.raises(ServerError, match="by another command"):
        bake(starter, "safe", "fast")
    other = starter.processes[-1]
    assert (other.poll(), record.read().pid) == (None, other.pid)
    assert list(standings()) == ["safe"]


def test_a_trial_that_died_under_the_load_leaves_no_record(starter, stub):
    def kill_server():
        starter.processes[-1].kill()

    stub.at_load = kill_server
    bake(starter, "safe")
    assert record.read() is None
    assert list(standings()) == ["safe"]


def test_a_trial_that_cannot_be_ended_does_not_hide_why(starter, stub, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    stub.at_load = lambda: os.kill(os.getpid(), signal.SIGTERM)
    starter.more = {"container": "c0ffee"}
    with interrupt.caught(), pytest.raises(KeyboardInterrupt):
        bake(starter, "safe")
    assert "./inv down ends the trial's server" in capsys.readouterr().err


def test_faults_of_the_command_or_the_machine_end_the_bake_off(starter):
    for error in (
        UsageError("--seed x is none", "it takes a number", "--seed 0"),
        StorageError("cannot run", "another command", "wait", code="storage.busy"),
        ServerError("port 8000 is taken", "another program", "--port 8001", code="server.port"),
    ):
        starter.acts = {"safe": fails(error)}
        with pytest.raises(type(error), check=lambda raised, error=error: raised is error):
            bake(starter, "safe")
        assert not bakeoff.record_path().exists()
        assert record.read() is None


@pytest.mark.parametrize(
    "wrong",
    [{"num_prompts": "x"}, {"conc": "1,x"}, {"limit": "0"}, {"text": "nothing"}, {"text": "wikitext-2-raw-test"},
     {"random_range_ratio": "2"}, {"result_filename": "a/b"}, {"isl": "40000"}, {"port": 99999}],
    ids=str,
)  # fmt: skip
def test_options_text_and_port_are_checked_before_a_server_is_ended(starter, wrong):
    starter.start(StartPlan("docker", profile="mine", trial=True))
    starter.started = []
    starter.request = replace(starter.request, port=wrong.get("port", starter.request.port))
    with pytest.raises((UsageError, InputError)):
        bake(starter, "safe", replace=True, **{name: value for name, value in wrong.items() if name != "port"})
    assert (starter.started, starter.processes[0].poll()) == ([], None)


def test_the_winners_command_has_the_options_and_without_a_winner_the_logs_are_named(starter, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    variables = {"MAX_MODEL_LEN": "8192", "TP": "1"}
    starter.request = replace(starter.request, model=str(tmp_path), stack="spark-next", variables=variables)
    bake(starter, "safe")
    server = f"--device docker --model {tmp_path} --stack spark-next --context 8192"
    assert f"TP=1 ./inv up --profile safe {server}\n" in capsys.readouterr().err
    starter.acts = {"safe": fails(NO_START)}
    with refused("benchmark.bakeoff", "no such kernel") as caught:
        bake(starter, "safe")
    assert Path(caught.value.fix.removeprefix("less ")).read_text() == "RuntimeError: in the container"


PARENT = """
import os, sys, time
from pathlib import Path
from sparkforge.core.process import spawn
from sparkforge.serve.supervise import supervised
command = supervised((sys.executable, "-c", "import time; print('served', flush=True); time.sleep(600)"), trial=True)
print(spawn(command, log=Path(sys.argv[1]), env=dict(os.environ), cwd=Path(sys.argv[1]).parent), flush=True)
time.sleep(600)
"""


def test_a_trial_ends_with_a_bake_off_that_is_killed(tmp_path, ended):
    log = tmp_path / "log"
    family = []
    with subprocess.Popen([sys.executable, "-c", PARENT, log], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        try:
            supervisor = psutil.Process(int(parent.stdout.readline()))
            family.append(supervisor)
            while b"served" not in (log.read_bytes() if log.exists() else b""):
                assert supervisor.status() != psutil.STATUS_ZOMBIE, log.read_text()
                time.sleep(0.02)
            family += supervisor.children(recursive=True)
            assert len(family) > 1
            parent.kill()
            parent.wait()
            assert [process.pid for process in family if not ended(process.pid, 20)] == []
        finally:
            parent.kill()
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
