"""One model over two Docker engines: this machine's network and a namespace, each with an engine of its own.

The other engine has no image until `cluster.sync --image` sends it. All traffic between the two goes over a veth pair
and a real sshd; vLLM's CPU build computes, with Gloo as the transport.
"""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys

import cluster_nodes as namespaces
import pytest
from waiting import wait_for

from sparkforge.core.paths import ROOT
from sparkforge.models import tiny

pytestmark = [pytest.mark.engine, pytest.mark.needs(*namespaces.PROGRAMS, "rsync")]
FLAGS = ("--dtype=float32", "--max-num-seqs=4")
PROMPTS = ("It is a truth universally", "Emma was")
PROJECT = "sparkforge-cluster"
KEY = "key-of-the-cluster"
IMAGE = "sparkforge/vllm:embedded"
END_SECONDS, START_SECONDS = 30, 900


@pytest.fixture(scope="module")
def nodes(project, engine, tmp_path_factory):
    """Two machines; `project` has built the image."""
    work = tmp_path_factory.mktemp("nodes")
    place = work / "engine"
    sockets = (os.environ["DOCKER_HOST"], f"unix://{place}/docker.sock")
    variables = [
        {"DOCKER_HOST": socket, "DOCKER_CONFIG": os.environ["DOCKER_CONFIG"], "COMPOSE_PROJECT_NAME": PROJECT}
        for socket in sockets
    ]
    for nodes in namespaces.made(work, own=True, variables=tuple(variables)):
        script, enter = ROOT / "tests/engine/engine.sh", [namespaces.NSENTER, f"--net=/run/netns/{nodes.spaces[1]}"]
        environment = {**os.environ, "SPARKFORGE_ENGINE": str(place)}
        environment = {name: value for name, value in environment.items() if not name.startswith("ENGINE_")}
        try:
            subprocess.run([*enter, script, "start"], env=environment, check=True, timeout=300)
            yield nodes
        finally:
            if (file := work / "cluster.toml").exists():
                nodes.inv("cluster.down", "--config", str(file), seconds=300)  # left by a failed test
            for number in (0, 1):
                docker(nodes, number, "compose", "-p", PROJECT, "down", "--volumes", "--timeout", "5", check=False)
            subprocess.run([script, "stop"], env=environment, check=False, timeout=300)
            shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def model(nodes):
    models = nodes.work / "models"
    tiny.write_tiny(models / "tiny")
    models.chmod(0o755)  # the container is another user
    return models / "tiny"


@pytest.fixture(scope="module")
def file(nodes, model, free_port):
    key = nodes.work / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    os.chown(key, 1000, 1000)
    return nodes.config(
        device="docker-cpu", model=json.dumps(str(model)), flags=json.dumps(FLAGS), key_file=json.dumps(str(key)),
        port=free_port(),
    )  # fmt: skip


def docker(nodes, index, *words, check=True):
    environment = {**nodes.environment, **nodes.variables[index]}
    command = ["docker", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def containers(nodes):
    """Return the ids of the project's containers on each node, including ended ones."""
    words = ("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}")
    return [docker(nodes, index, *words) for index in (0, 1)]


def complete(port, prompt):
    """Return the tokens of an answer and their log probabilities."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    logprobs = answer["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def port_of(file):
    return int(next(line for line in file.read_text().splitlines() if line.startswith("port = ")).split()[-1])


@pytest.fixture(scope="module")
def one(nodes, model, file):
    """The answers of a single node with the same image."""
    port = port_of(file)
    words = ("--device", "docker-cpu", "--model", str(model), "--port", str(port), "--api-key-file", nodes.work / "key")
    # As ./inv runs it: plain `invoke` drops what follows --.
    command = [sys.executable, "-m", "sparkforge.cli", "up", *map(str, words), "--", *FLAGS]
    environment = {"cwd": ROOT, "env": nodes.environment}
    done = subprocess.run(command, **environment, capture_output=True, text=True, check=False, timeout=START_SECONDS)
    assert done.returncode == 0, done.stderr
    answers = [complete(port, prompt) for prompt in PROMPTS]
    assert nodes.inv("down").returncode == 0
    return answers


@pytest.fixture(scope="module")
def sent(nodes, file):
    done = nodes.inv("cluster.sync", "--config", str(file), "--image", seconds=START_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def up(one, sent, nodes, file):
    done = nodes.inv("cluster.up", "--config", str(file), seconds=START_SECONDS)
    logs = nodes.inv("cluster.logs", "--config", str(file)).stdout if done.returncode else ""
    assert done.returncode == 0, done.stderr + logs
    return done


def test_the_image_is_sent_over_the_link_once(sent, nodes, file):
    assert f"worker: gets {IMAGE}" in sent
    again = nodes.inv("cluster.sync", "--config", str(file), "--image")
    assert again.returncode == 0, again.stderr
    assert f"worker: has {IMAGE} already" in again.stderr


def test_another_image_on_one_node_refuses_the_start(sent, nodes, file):
    wanted = docker(nodes, 1, "image", "inspect", "--format", "{{.Id}}", IMAGE)
    docker(nodes, 1, "tag", "docker.io/sparkforge-ci/debian:bookworm-slim", IMAGE)
    try:
        done = nodes.inv("cluster.up", "--config", str(file))
    finally:
        docker(nodes, 1, "tag", wanted, IMAGE)
    assert done.returncode == 30
    assert "images: the image differs: head has sha256:" in done.stderr
    assert containers(nodes) == ["", ""]


def test_a_validator_that_refuses_starts_nothing_on_any_node(sent, nodes, model, file):
    shard = max(model.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as opened:
        begin = opened.read(1)
        opened.seek(0)
        opened.write(bytes([begin[0] ^ 255]))  # a byte of the header's length
    try:
        done = nodes.inv("cluster.up", "--config", str(file), seconds=START_SECONDS)
    finally:
        with shard.open("r+b") as opened:
            opened.write(begin)
    assert done.returncode == 24
    assert "the validator refuses" in done.stderr
    assert "FAIL model-files" in done.stderr
    assert "] workers" not in done.stderr
    assert containers(nodes) == ["", ""]


def test_two_nodes_answer_as_one(up, one, nodes, file):
    assert up.stdout.strip() == f"http://127.0.0.1:{port_of(file)}/v1"
    steps = [up.stderr.index(f"] {step}") for step in ("check", "validation", "workers", "head")]
    assert steps == sorted(steps)
    for (tokens, logprobs), prompt in zip(one, PROMPTS, strict=True):
        of_two, logprobs_of_two = complete(port_of(file), prompt)
        assert len(tokens) == 12
        assert of_two == tokens
        assert logprobs_of_two == pytest.approx(logprobs, abs=1e-4)


def test_each_part_runs_in_its_own_engine_as_nobody_with_the_hosts_network_and_no_device(up, nodes):
    for index, identity in enumerate(containers(nodes)):
        assert len(identity.split()) == 1
        facts = json.loads(docker(nodes, index, "inspect", identity))[0]
        host = facts["HostConfig"]
        assert (host["NetworkMode"], host["RestartPolicy"]["Name"]) == ("host", "no")
        assert (host["Devices"] or [], host["Ulimits"] or []) == ([], [])
        assert host["CapDrop"] == ["ALL"]
        assert host["ReadonlyRootfs"]
        assert facts["Config"]["User"] == "1000:1000"
        assert docker(nodes, index, "exec", identity, "sh", "-c", "ulimit -l") != "unlimited"


def test_the_api_listens_on_the_heads_loopback_only(up, nodes, file):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((namespaces.HEAD, port_of(file)), timeout=5)
    connection = http.client.HTTPConnection("127.0.0.1", port_of(file), timeout=20)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 401


def test_status_and_logs_name_both(up, nodes, file):
    code, shown = nodes.status(file)
    assert code == 0
    assert {name: node["state"] for name, node in shown["nodes"].items()} == {"head": "running", "worker": "running"}
    assert shown["restarts"]["state"] == "watching"
    lines = nodes.inv("cluster.logs", "--config", str(file), "--lines", "400").stdout.splitlines()
    for rank, name in enumerate(("head  ", "worker")):
        own = [line for line in lines if line.startswith(f"{name} | ")]
        assert any("validate ·" in line for line in own)
        assert any(f"world_size=2 rank={rank}" in line for line in own)
    assert KEY not in "".join(lines)


def test_a_killed_container_ends_the_other_by_its_name_and_both_start_again_in_order(up, one, nodes, file):
    head, worker = containers(nodes)
    docker(nodes, 1, "kill", worker)
    running = ("inspect", "--format", "{{.State.Running}}", head)
    wait_for(lambda: docker(nodes, 0, *running, check=False) != "true", END_SECONDS)
    note, log = nodes.work / "a/cluster.keep.json", nodes.work / "a/logs/cluster.log"
    wait_for(lambda: json.loads(note.read_text())["why"].startswith("started again"), START_SECONDS, log.read_text)
    assert "node worker ended this node's part" in (nodes.work / "a/logs/cluster.container.log").read_text()
    code, shown = nodes.status(file)
    assert code == 0
    assert shown["restarts"]["failures"] == 1
    assert shown["restarts"]["why"].startswith("started again after: node worker: ")
    kept = log.read_text()
    order = [kept.index(step) for step in ("pausing: node worker: ", "] validation", "] workers", "] head")]
    assert order == sorted(order)
    assert not {head, worker} & set(containers(nodes))
    for (tokens, _), prompt in zip(one, PROMPTS, strict=True):
        assert complete(port_of(file), prompt)[0] == tokens


def test_down_leaves_nothing_on_either_node(up, nodes, file):
    assert nodes.inv("cluster.down", "--config", str(file), seconds=300).returncode == 0
    assert containers(nodes) == ["", ""]
    code, shown = nodes.status(file)
    assert code == 24
    assert {node["state"] for node in shown["nodes"].values()} == {"stopped"}
    assert shown["restarts"]["state"] == "off"
    for port in (port_of(file), 29500, 29501):
        for address in ("127.0.0.1", namespaces.HEAD):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)
    kept = nodes.inv("cluster.logs", "--config", str(file), "--lines", "400").stdout  # of removed containers
    assert "validate ·" in kept
