"""Each node's flags and variables, what a node answers, and what the head makes of it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from sparkforge.core.errors import NetworkError, ProcessError, RefusalError, ServerError, UsageError
from sparkforge.core.paths import ROOT
from sparkforge.serve import launch
from sparkforge.serve.cluster import checks, node, remote, start
from sparkforge.serve.cluster.config import ClusterNode
from sparkforge.serve.command_line import ServerCommand
from sparkforge.serve.devices import in_environment

pytestmark = pytest.mark.slow  # real programs in most of them


@pytest.fixture
def config(healthy):
    return healthy.config


def test_each_node_gets_its_rank_and_only_workers_are_headless(config):
    head, worker = (config.engine_flags(node) for node in config.nodes)
    assert {"--nnodes=2", "--node-rank=0", "--tensor-parallel-size=2", "--master-addr=192.168.177.11"} < set(head)
    assert "--headless" not in head
    assert {"--node-rank=1", "--headless", "--master-addr=192.168.177.11"} < set(worker)
    assert "--enable-expert-parallel" in config.model_copy(update={"expert": True}).engine_flags(config.head)


def test_a_worker_is_started_by_the_command_that_has_headless():
    command = ServerCommand("/m", "m", "127.0.0.1", 8000, extra_arguments=("--headless",)).command("python")
    assert command[:4] == ("python", "-m", "vllm.entrypoints.cli.main", "serve")
    assert ServerCommand("/m", "m", "127.0.0.1", 8000).command("python")[2] == "vllm.entrypoints.openai.api_server"


def test_nccl_and_gloo_take_the_control_network_and_both_halves(config):
    variables = config.workers[0].variables
    assert variables == {
        "VLLM_HOST_IP": "192.168.177.12",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
        "NCCL_IB_HCA": "=rocep1s0f1,roceP2p1s0f1",
    }


def ask(request):
    command = [sys.executable, "-m", start.MODULE]
    result = subprocess.run(command, input=request, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Traceback" not in result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("request_", ["", "{}", "[1]", '{"action": "status", "name": "x", "config": {}}', "{" * 99])
def test_a_malformed_request_is_answered_with_an_error(request_):
    assert {"what", "why", "fix", "code"} == ask(request_)["error"].keys()


def test_a_node_where_nothing_runs_says_so(config):
    embedded = config.model_copy(update={"device": "embedded"})
    body = {"name": "spark", "config": embedded.model_dump(by_alias=True, mode="json")}
    assert ask(json.dumps({"action": "status", **body})) == {"state": "stopped"}
    assert ask(json.dumps({"action": "down", **body})) == {"state": "nothing to stop"}
    assert ask(json.dumps({"action": "logs", **body})) == {"lines": []}


def test_an_action_that_there_is_not_is_answered_with_an_error(config):
    body = {"name": "spark", "config": config.model_dump(by_alias=True, mode="json")}
    assert "reboot" in ask(json.dumps({"action": "reboot", **body}))["error"]["why"]


@pytest.fixture
def asked(config, healthy, monkeypatch):
    """Return what was asked of which node, in order; `answers` has what they answer, by node and action."""
    questions, answers = [], {}

    def answer(_config, node, action, **_more):
        questions.append((node.name, action))
        reply = answers.get((node.name, action), {"verdict": "serve", "state": "running", "url": "http://x"})
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(start, "ask", answer)
    monkeypatch.setattr(checks, "look", lambda _config: healthy)
    embedded = config.model_copy(update={"device": "embedded"})
    return embedded, questions, answers


def test_workers_start_before_the_head_after_every_node_was_validated(asked):
    config, questions, _ = asked
    assert start.up(config)["url"] == "http://x"
    assert sorted(questions[:2]) == [("spark", "validate"), ("spark2", "validate")]
    assert questions[2:] == [("spark2", "begin"), ("spark", "start")]


def test_a_refused_validation_starts_nothing(asked):
    config, questions, answers = asked
    answers["spark2", "validate"] = ServerError("spark2: the validator refuses", "x", "y")
    with pytest.raises(ServerError, match="spark2"):
        start.up(config)
    assert {action for _, action in questions} == {"validate"}


def test_a_refused_check_asks_no_node_for_anything(asked, healthy, monkeypatch):
    config, questions, _ = asked
    monkeypatch.setattr(checks, "look", lambda _config: replace(healthy, reaches={}))
    with pytest.raises(RefusalError, match="firewall"):
        start.up(config)
    assert questions == []


@pytest.mark.parametrize("failing", [("spark2", "begin"), ("spark", "start")])
def test_a_start_that_fails_leaves_no_part_running(asked, failing):
    config, questions, answers = asked
    answers[failing] = ServerError("it did not start", "x", "y")
    with pytest.raises(ServerError, match="did not start"):
        start.up(config)
    assert sorted(questions[-2:]) == [("spark", "down"), ("spark2", "down")]


def test_an_end_that_fails_too_does_not_hide_why_the_start_failed(asked, capsys):
    config, _, answers = asked
    answers["spark", "start"] = ServerError("it did not start", "x", "y")
    answers["spark2", "down"] = NetworkError("unreachable", "No route to host", "ssh spark2 true")
    with pytest.raises(ServerError, match="did not start"):
        start.up(config)
    assert "spark2 may still run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "SPARKFORGE_API_KEY_FILE", "SPARKFORGE_ALLOWED_HOSTS"])
def test_a_key_or_host_that_it_would_not_heed_is_refused_by_name(asked, monkeypatch, name):
    config, questions, _ = asked
    monkeypatch.setenv(name, "x")
    with pytest.raises(UsageError, match=name):
        start.up(config)
    assert questions == []


@pytest.mark.parametrize("lines", [-1, 0, 401])
def test_a_number_of_lines_that_no_log_has_is_refused(asked, lines):
    config, questions, _ = asked
    with pytest.raises(UsageError, match=f"--lines {lines}"):
        start.show_logs(config, lines)
    assert questions == []


def test_a_server_of_the_checkout_that_runs_is_refused_before_anything_starts(config, monkeypatch):
    def refuse():
        raise ServerError("a server of this checkout runs already", "x", "./inv down", code="server.running")

    monkeypatch.setattr(launch, "refuse_second", refuse)
    monkeypatch.setattr(node, "EmbeddedNode", lambda *_: pytest.fail("it went on"))
    with pytest.raises(ServerError, match="runs already"):
        node.answer(node.NodeRequest(action="validate", name="spark", config=config))


def test_a_profile_that_is_not_for_this_device_is_refused_before_an_environment_is_made(config, monkeypatch):
    monkeypatch.setattr(in_environment, "prepare_environment", lambda *_: pytest.fail("it went on"))
    changed = config.model_copy(update={"profile": "no-such-profile", "device": "embedded"})
    request = node.NodeRequest(action="validate", name="spark", config=changed)
    with pytest.raises(UsageError, match="no-such-profile"):
        node.answer(request)


def test_down_asks_all_and_names_the_one_that_does_not_answer(asked):
    config, questions, answers = asked
    answers["spark2", "down"] = NetworkError("unreachable", "No route to host", "ssh spark2 true")
    with pytest.raises(ServerError, match="spark2 may still run"):
        start.down(config)
    assert ("spark", "down") in questions


def test_a_silent_node_is_a_state(asked, capsys):
    config, _, answers = asked
    answers["spark2", "status"] = NetworkError("unreachable", "No route to host", "ssh spark2 true")
    start.show_status(start.status(config))
    assert "spark2  silent   No route to host" in capsys.readouterr().out


def test_a_command_on_another_machine_is_quoted_and_asks_nothing():
    other = ClusterNode(name="b", ssh="me@b", folder="/a b", state="/s t", address="10.0.0.2", interface="eth0")
    command = remote.command_line(other, ["python3", "-", '{"x": "$(reboot)"}'])
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[-2:] == ["me@b", "cd '/a b' && exec env 'SPARKFORGE_STATE=/s t' python3 - '{\"x\": \"$(reboot)\"}'"]
    assert command[-3] == "--"


def test_a_program_that_fails_on_a_node_names_the_node():
    node = ClusterNode(name="a", address="10.0.0.1", interface="eth0")
    with pytest.raises(ProcessError, match="false failed on a"):
        remote.output(node, ["false"], seconds=10)
