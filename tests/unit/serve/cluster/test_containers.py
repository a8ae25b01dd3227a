"""A node's part in a container: Compose's command lines and variables with a stand-in docker, and NCCL's log."""

import json
import shlex
import subprocess
import sys

import pytest
from servers import recorded

from sparkforge.core.errors import EngineError, RefusalError, ServerError, StorageError
from sparkforge.core.process import started_at
from sparkforge.image import compose
from sparkforge.serve import entrypoint, record
from sparkforge.serve.cluster import node, watch
from sparkforge.serve.cluster.node import NodeRequest

# https://github.com/mark-ramsey-ri/vllm-dgx-spark/issues/1, two Sparks under Ray with NVIDIA's plugin.
RDMA = """\
(EngineCore_DP0 pid=2301) (RayWorkerWrapper pid=2981, ip=169.254.28.198) spark-3995:2981:3111 [0] NCCL INFO NET/IB : GPU Direct RDMA (DMABUF) enabled for HCA 1 'roceP2p1s0f1
(EngineCore_DP0 pid=2301) (RayWorkerWrapper pid=2981, ip=169.254.28.198) spark-3995:2981:3113 [0] NCCL INFO Channel 09/0 : 1[0] -> 0[0] [send] via NET/IBext_v10/1
(EngineCore_DP0 pid=2301) (RayWorkerWrapper pid=2981, ip=169.254.28.198) spark-3995:2981:3113 [0] NCCL INFO Channel 10/0 : 1[0] -> 0[0] [send] via NET/IBext_v10/0
"""  # noqa: E501
# https://github.com/NVIDIA/nccl/issues/952, "NET/IB : No device found"; GPUs of one machine reach each other by P2P.
TCP = """\
<cluster_name>:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read
<cluster_name>:926:1151 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
<cluster_name>:926:1151 [7] NCCL INFO Channel 07/0 : 15[7] -> 6[6] [send] via NET/Socket/3
"""


@pytest.fixture
def config(healthy):
    return healthy.config.model_copy(update={"model": "", "flags": ("--max-num-seqs=8",), "profile": "safe"})


@pytest.fixture
def asked(config, docker_command, absent, monkeypatch):
    """A stand-in docker that also records the variables; returns a function that performs a node's action."""
    monkeypatch.delenv("SPARKFORGE_COMPOSE_FILES", raising=False)
    script = docker_command.folder / "docker"
    script.write_text(script.read_text().replace("here=", 'case "$*" in *" up "*) env > "$0.env";; esac\nhere=', 1))

    def ask(name, action):
        request = NodeRequest.model_validate(
            {"action": action, "name": name, "token": "t0", "config": config.model_dump(by_alias=True, mode="json")}
        )
        return node.answer(request)

    return ask


@pytest.fixture
def absent(fake_engine):
    """An engine without our container; returns a function that adds the container in a state and with a log."""
    there = fake_engine.routes.pop("GET /containers/json")
    fake_engine.routes["GET /containers/json"] = lambda query: (200, [])

    def create(log="", **state):
        fake_engine.log = log
        fake_engine.container["State"] |= {"Health": {}, **state}
        fake_engine.routes["GET /containers/json"] = there

    return create


def variables(docker_command):
    lines = (docker_command.folder / "docker.env").read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines if "=" in line)


def test_a_worker_is_validated_in_its_container_and_then_started(asked, absent, config, docker_command):
    absent()
    assert asked("spark2", "validate") == {"verdict": "serve"}
    assert asked("spark2", "begin") == {"state": "running"}
    calls = [call for call in docker_command.calls if call.startswith("compose")]
    assert all("docker-compose.yml --file" in call and "docker-compose.cluster.yml" in call for call in calls)
    once = "run --rm --no-deps --no-TTY"
    assert calls[0].partition("cluster.yml ")[2].startswith(f"{once} --entrypoint /opt/venv/bin/python vllm -c ")
    assert calls[1].endswith(f"{once} vllm validate")
    assert calls[2].endswith("up --detach --no-build vllm")
    passed = variables(docker_command)
    assert shlex.split(passed["VLLM_ARGS"]) == [
        "--tensor-parallel-size=2", "--pipeline-parallel-size=1", "--distributed-executor-backend=mp", "--nnodes=2",
        "--node-rank=1", "--master-addr=192.168.177.11", "--master-port=29500", "--headless", "--max-num-seqs=8",
    ]  # fmt: skip
    assert "--headless" not in config.engine_flags(config.head)
    assert "--enable-expert-parallel" in config.model_copy(update={"expert": True}).engine_flags(config.head)
    assert passed["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
    assert passed["GLOO_SOCKET_IFNAME"] == "enp1s0f1np1"
    assert passed["SPARKFORGE_SERVE_PROFILE"] == "safe"
    watching = watch.parser().parse_args([*json.loads(passed[entrypoint.CLUSTER]), "--", "x"])
    assert (watching.node, watching.address, watching.port) == ("spark2", "192.168.177.11", 29501)
    assert (watching.peers, watching.listen) == (["spark"], False)
    assert record.read().container == "c0ffee" * 10  # the container that `./inv down` ends
    assert not record.begun_path().exists()


def test_without_gpus_no_rdma_is_asked_for_and_the_file_without_devices_comes_last(
    asked, absent, config, docker_command
):
    cpu = config.model_copy(update={"device": "docker-cpu", "profile": "embedded"})
    worker = node.ContainerNode(cpu, cpu.workers[0], "t0")
    assert worker.validate() == "serve"
    (call,) = docker_command.calls
    assert "cluster.yml --file" in call
    assert call.endswith("docker-compose.cluster.cpu.yml run --rm --no-deps --no-TTY vllm validate")
    absent()
    worker.begin()
    assert "docker-compose.cluster.cpu.yml up --detach" in " ".join(docker_command.calls)
    assert variables(docker_command)["SPARKFORGE_STACK"] == "embedded"


@pytest.mark.parametrize("content", ["a-key-of-the-clients", "", None])
def test_the_heads_start_proves_itself_with_the_key_that_compose_resolves(config, docker_command, tmp_path, content):
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    service = {"image": "x", "environment": {compose.STACK: "spark"}}
    project = {"services": {"vllm": service}, "secrets": {"api_key": {"file": str(file)}}}
    docker_command.answers("config --format json", out=json.dumps(project))
    head = node.ContainerNode(config.model_copy(update={"device": "docker-cpu", "profile": ""}), config.head)
    with pytest.raises(EngineError if content else StorageError):  # there is no engine
        head.start()
    assert head.service.key_file == str(file)
    assert any(" up " in call for call in docker_command.calls) == bool(content)


def test_a_container_without_rdma_is_refused_and_not_validated(asked, docker_command, tmp_path):
    def probe():
        program = node.RDMA_PROBE.replace("/dev/infiniband", str(tmp_path))
        limited = ["prlimit", "--memlock=8192", sys.executable, "-c", program]
        return subprocess.run(limited, capture_output=True, text=True, check=True).stdout.splitlines()

    limit = "it may lock 8192 bytes of memory only"
    assert probe() == [f"there is no {tmp_path}/uverbs*, so NCCL would use TCP", limit]
    (tmp_path / "uverbs0").touch()
    assert probe() == [limit]
    docker_command.answers("--entrypoint", out="its user may not open it\nit may lock 8 bytes\n")
    with pytest.raises(RefusalError, match="no RDMA") as refused:
        asked("spark2", "validate")
    assert refused.value.why == "its user may not open it; it may lock 8 bytes"
    assert not any("validate" in call for call in docker_command.calls)


def test_a_validator_that_refuses_is_quoted(asked, docker_command):
    report = "PASS a\nFAIL kernels-native  no MXFP4\n       next: ./inv build\n"
    docker_command.answers("vllm validate", out=report, code=30)
    with pytest.raises(RefusalError, match="spark2") as refused:
        asked("spark2", "validate")
    assert "kernels-native" in refused.value.why
    assert refused.value.fix == "./inv build"


def test_a_node_says_whether_its_container_runs_and_which_node_ended_it(asked, absent, docker_command):
    assert asked("spark", "status") == {"state": "stopped"}
    assert asked("spark", "down") == {"state": "nothing to stop"}
    log = watch.MESSAGE.format(node="spark2", why="it sent nothing for 10 s")
    absent(f"x\nStarting to load model\n{log}\n", Status="running")
    running = {"state": "running", "container": "c0ffeec0ffee", "milestone": "loading the model"}
    assert asked("spark", "status") == running
    absent(f"x\n{log}\n", Status="paused")
    assert asked("spark", "status") == {"state": "paused", "why": "the container is paused"}
    absent(f"x\n{log}\n", Status="exited", ExitCode=24)
    assert asked("spark", "status") == {
        "state": "ended", "why": "node spark2: it sent nothing for 10 s", "asked": False, "left": 0,
    }  # fmt: skip
    assert asked("spark", "logs")["lines"][0] == "x"
    assert asked("spark", "down") == {"state": "stopped the container"}
    assert docker_command.calls[-1].endswith("--profile * down")


def test_without_a_container_down_ends_what_the_record_names(asked):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as server:
        begun = started_at(server.pid)
        record.write(recorded(pid=server.pid))
        try:
            assert asked("spark", "down") == {"state": f"stopped pid {server.pid}"}
            assert started_at(server.pid) != begun
        finally:
            server.kill()
    assert record.read() is None


def test_a_start_over_tcp_is_ended_with_that_finding_and_its_log_stays(
    asked, absent, docker_command, fake_engine, monkeypatch
):
    project = {"services": {"vllm": {"image": "x", "environment": {compose.STACK: "spark"}}}}
    docker_command.answers("config --format json", out=json.dumps(project))
    absent(TCP)
    server = recorded(container="0123456789abcdef")
    monkeypatch.setattr(node.ContainerNode, "serve", lambda *_: record.write(server) or server)
    with pytest.raises(ServerError, match="TCP in place of RDMA"):
        asked("spark", "start")
    assert docker_command.calls[-1].endswith("--profile * down")
    assert record.read() is None
    fake_engine.routes["GET /containers/json"] = lambda query: (200, [])
    assert asked("spark", "logs")["lines"] == TCP.splitlines()


@pytest.mark.parametrize(
    ("code", "log", "asked_for"),
    [
        (143, "", True),  # `docker stop`
        (0, "", True),  # vLLM exits with 0 after SIGTERM; the supervisor otherwise never does
        (24, watch.MESSAGE.format(node="spark2", why=watch.STOPPED), True),
        (143, watch.MESSAGE.format(node="spark2", why="its server ended with code 1"), False),
        (137, "", False),  # may be a kill for memory
    ],
)
def test_a_container_that_somebody_stopped_is_told_from_one_that_died(asked, absent, code, log, asked_for):
    absent(f"{log}\n", Status="exited", ExitCode=code)
    assert asked("spark", "status")["asked"] is asked_for


@pytest.mark.parametrize(
    ("log", "tcp", "description"),
    [
        (RDMA, 0, "RDMA carries all 2 channels, over 2 devices"),
        (TCP, 2, "TCP carries 2 of 2 channels"),
        (RDMA + TCP, 2, "TCP carries 2 of 4 channels"),
        ("NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE", 0, "not known"),
    ],
)
def test_ncclls_log_says_what_carries_the_model(log, tcp, description):
    assert node.transport(log) == (tcp, description)
