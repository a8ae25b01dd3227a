"""A bake-off of serve profiles against a stub: ranking, interrupts, and when `--profile auto` refuses its winner."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest

from sparkforge.bench import trials
from sparkforge.core import paths
from sparkforge.core.errors import BenchmarkError, InputError, ServerError, UsageError
from sparkforge.core.paths import ROOT
from sparkforge.core.process import started_at
from sparkforge.serve import record
from sparkforge.serve.record import Server
from sparkforge.serve.start import StartRequest

PYTHON = Path("/nonexistent")
FLAGS = {
    "isl": "24", "osl": "8", "conc": "1", "num_prompts": "3", "warmups": "0", "client": "own", "silence": "60",
    "text": "persuasion-24",
}  # fmt: skip
REQUEST = StartRequest("docker", port=1)


@pytest.fixture
def starter(stub, unused_port):
    """Start "servers": a process that sleeps, recorded at the stub's address; `acts` maps a profile to what it does."""
    fake = SimpleNamespace(acts={}, started=[], processes=[], request=StartRequest("docker", port=unused_port))

    def start(request):
        assert request.trial
        fake.started.append(request.profile)
        fake.acts.get(request.profile, lambda: None)()
        process = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
        fake.processes.append(process)
        port, begun = urlsplit(stub.url).port, started_at(process.pid)
        server = Server(
            process.pid, begun, "127.0.0.1", port, "m", "honest-model", "docker", "", profile=request.profile
        )
        record.write(server)
        return server

    fake.start = start
    yield fake
    for process in fake.processes:
        process.kill()
        process.wait()


def bake(starter, *names, **flags):
    trials.run(names, {**FLAGS, **flags}, starter.request, starter.start, PYTHON)


def fails(error):
    def act():
        raise error

    return act


NO_START = ServerError("the server ended, before it served", "RuntimeError: no such kernel", "./inv doctor")


def test_profiles_are_ranked_and_the_winner_is_taken(starter, stub, capsys):
    starter.acts = {"fast": fails(NO_START), "long-context": lambda: vars(stub).update(logprob=-9.0)}
    bake(starter, "fast", "safe", "long-context")
    done = json.loads((paths.state() / "bakeoff.json").read_text())
    assert done["complete"]
    assert done["machine"]["processor"]
    standings = {name: trial["standing"] for name, trial in done["trials"].items()}
    assert "no such kernel" in standings["fast"]["why"]
    assert "accuracy gate" in standings["long-context"]["why"]
    assert standings["safe"]["score"] > 0
    assert done["trials"]["safe"]["settings"]["--max-num-seqs"] == "16"
    assert record.read() is None
    assert all(process.wait(10) is not None for process in starter.processes)
    shown = capsys.readouterr().err
    assert "./inv up --profile auto" in shown
    assert shown.index("1") < shown.index("long-context")
    assert trials.winner("docker", "spark", "") == "safe"


def test_a_bake_off_that_nobody_passes_has_no_winner(starter):
    starter.acts = {"safe": fails(NO_START)}
    with pytest.raises(
        BenchmarkError, match="no profile passed", check=lambda error: error.code == "benchmark.bakeoff"
    ):
        bake(starter, "safe")
    with pytest.raises(BenchmarkError, match="no profile passed", check=lambda error: error.code == "benchmark.stale"):
        trials.winner("docker", "spark", "")


@pytest.mark.parametrize("when", ["start", "load"])
def test_an_interrupted_bake_off_leaves_no_server_and_goes_on(starter, stub, when, monkeypatch):
    if when == "start":
        starter.acts = {"fast": fails(KeyboardInterrupt())}
    else:
        measure = trials.runs.measure
        loads = []

        def interrupted(flags, python):
            loads.append(1)
            if len(loads) == 2:
                raise KeyboardInterrupt
            return measure(flags, python)

        monkeypatch.setattr(trials.runs, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bake(starter, "safe", "fast", "long-context")
    assert record.read() is None
    assert all(process.wait(10) is not None for process in starter.processes)
    with pytest.raises(BenchmarkError, match="interrupted before fast, long-context") as caught:
        trials.winner("docker", "spark", "")
    assert "--profiles safe,fast,long-context" in caught.value.fix
    starter.acts, starter.started = {}, []
    bake(starter, "safe", "fast", "long-context")
    assert starter.started == ["fast", "long-context"]
    assert {standing.name for standing in trials.read().ranking} == {"safe", "fast", "long-context"}
    starter.started = []
    bake(starter, "safe")  # a finished one is not gone on with
    assert starter.started == ["safe"]


def test_an_interrupted_bake_off_of_another_shape_or_machine_begins_anew(starter, monkeypatch):
    starter.acts = {"fast": fails(KeyboardInterrupt())}
    with pytest.raises(KeyboardInterrupt):
        bake(starter, "safe", "fast")
    starter.acts, starter.started = {}, []
    bake(starter, "safe", osl="4")
    assert starter.started == ["safe"]


CHANGES = {
    "GPUs and driver": {"gpus": ["NVIDIA GB10, 590.1"]},
    "memory": {"memory_bytes": 1 << 40},
    "processor": {"cores": 999},
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_winner_of_another_machine_is_refused_with_the_reason(starter, monkeypatch, key):
    bake(starter, "safe")
    facts = trials.facts
    monkeypatch.setattr(trials, "facts", lambda: {**facts(), **CHANGES[key]})
    with pytest.raises(BenchmarkError, match=f"{key}: then", check=lambda error: error.code == "benchmark.stale"):
        trials.winner("docker", "spark", "")


def test_a_winner_of_another_model_stack_device_or_profile_is_refused(starter, monkeypatch, tmp_path):
    with pytest.raises(BenchmarkError, match="no bake-off has run"):
        trials.winner("docker", "spark", "")
    bake(starter, "safe")
    (tmp_path / "config.json").write_text("{}")
    for arguments, reason in (
        (("docker", "spark", str(tmp_path)), "model: then the device's default"),
        (("docker", "spark-next", ""), "stack: then spark, now spark-next"),
        (("docker-cpu", "spark", ""), "device: then docker, now docker-cpu"),
    ):
        with pytest.raises(BenchmarkError, match=reason):
            trials.winner(*arguments)
    inputs = trials._inputs
    monkeypatch.setattr(trials, "_inputs", lambda *arguments: {**inputs(*arguments), "patches/x": "changed"})
    with pytest.raises(BenchmarkError, match="locks and patches: then"):
        trials.winner("docker", "spark", "")
    monkeypatch.setattr(trials, "_inputs", inputs)
    monkeypatch.setattr(trials, "_settings", lambda *_: {"--max-num-seqs": "17"})
    with pytest.raises(BenchmarkError, match="has other flags"):
        trials.winner("docker", "spark", "")


def test_a_record_that_is_no_record_is_refused(starter):
    paths.state().mkdir(parents=True, exist_ok=True)
    trials.record_path().write_text('{"format": "other"}')
    with pytest.raises(InputError, match="cannot be read"):
        trials.winner("docker", "spark", "")
    bake(starter, "safe")  # and does not keep a new one from being made
    assert trials.winner("docker", "spark", "") == "safe"


def test_a_server_that_runs_is_not_ended_without_saying(starter):
    starter.start(StartRequest("docker", profile="mine", trial=True))
    starter.started = []
    with pytest.raises(ServerError, match="runs", check=lambda error: "--replace" in error.fix):
        bake(starter, "safe")
    assert (starter.started, starter.processes[0].poll()) == ([], None)
    bake(starter, "safe", replace=True)
    assert starter.processes[0].wait(10) is not None
    assert starter.started == ["safe"]


@pytest.mark.parametrize("names", [("nothing",), ("auto",), (), ("safe", "nothing")])
def test_names_are_checked_before_anything_starts(starter, names):
    with pytest.raises(UsageError):
        bake(starter, *names)
    assert starter.started == []


PARENT = """
import os, sys, time
from pathlib import Path
from sparkforge.core.process import spawn
from sparkforge.serve.supervise import supervised
command = supervised((sys.executable, "-c", "import time; print('served', flush=True); time.sleep(600)"), trial=True)
print(spawn(command, log=Path(sys.argv[1]), env=dict(os.environ), cwd=Path(sys.argv[1]).parent), flush=True)
time.sleep(600)
"""


def test_a_trial_ends_with_a_bake_off_that_is_killed(tmp_path):
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, log], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    supervisor = psutil.Process(int(parent.stdout.readline()))
    while b"served" not in (log.read_bytes() if log.exists() else b""):
        assert supervisor.is_running()
    family = [supervisor, *supervisor.children(recursive=True)]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
