"""The flags, variables and answers of nodes, and the head's handling of the answers."""

import json
import subprocess
import sys

import pytest

from sparkforge.core.errors import NetworkError, ServerError, UsageError
from sparkforge.core.paths import ROOT
from sparkforge.serve.cluster import checks, node, remote, start
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode

pytestmark = pytest.mark.slow  # real programs in most of them


@pytest.fixture
def config(healthy):
    return healthy.config


def ask(request):
    command = [sys.executable, "-m", start.MODULE]
    result = subprocess.run(command, input=request, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Traceback" not in result.stderr
    return json.loads(result.stdout)


def test_a_request_is_answered_and_a_malformed_one_with_an_error(config):
    embedded = config.model_copy(update={"device": "embedded"})
    body = {"name": "spark", "config": embedded.model_dump(by_alias=True, mode="json")}
    answers = {"status": {"state": "stopped"}, "down": {"state": "nothing to stop"}, "logs": {"lines": []}}
    for action, answer in answers.items():
        assert ask(json.dumps({"action": action, **body})) == answer
    for malformed in ("", "[1]", '{"action": "status", "name": "x", "config": {}}', "{" * 99):
        assert {"what", "why", "fix", "code"} == ask(malformed)["error"].keys()


@pytest.fixture
def asked(config, healthy, monkeypatch):
    """Return a configuration, the list of requests to nodes, and the table of answers by node and action."""
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


@pytest.mark.parametrize("failing", [("spark2", "validate"), ("spark2", "begin"), ("spark", "start")])
def test_a_refused_validation_starts_nothing_and_a_start_that_fails_leaves_no_part_running(asked, failing):
    config, questions, answers = asked
    answers[failing] = ServerError("it did not start", "x", "y")
    with pytest.raises(ServerError, match="did not start"):
        start.up(config)
    if failing[1] == "validate":
        assert {action for _, action in questions} == {"validate"}
    else:
        assert sorted(questions[-2:]) == [("spark", "down"), ("spark2", "down")]


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "SPARKFORGE_API_KEY_FILE", "SPARKFORGE_ALLOWED_HOSTS"])
def test_a_key_or_host_that_it_would_not_heed_is_refused_by_name(asked, monkeypatch, name):
    config, questions, _ = asked
    monkeypatch.setenv(name, "x")
    with pytest.raises(UsageError, match=name):
        start.up(config)
    assert questions == []


def test_a_node_that_does_not_end_is_named_and_hides_neither_the_others_nor_why_a_start_failed(asked, capsys):
    config, questions, answers = asked
    answers["spark2", "down"] = NetworkError("unreachable", "No route to host", "ssh spark2 true")
    with pytest.raises(ServerError, match="spark2 may still run"):
        start.down(config)
    assert ("spark", "down") in questions
    answers["spark", "start"] = ServerError("it did not start", "x", "y")
    with pytest.raises(ServerError, match="did not start"):
        start.up(config)
    assert "spark2 may still run" in capsys.readouterr().err


def test_a_command_on_another_machine_is_quoted_and_asks_nothing():
    other = ClusterNode(name="b", ssh="me@b", folder="/a b", state="/s t", address="10.0.0.2", interface="eth0")
    command = remote.command_line(other, ["python3", "-", '{"x": "$(reboot)"}'])
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[-2:] == ["me@b", "cd '/a b' && exec env 'SPARKFORGE_STATE=/s t' python3 - '{\"x\": \"$(reboot)\"}'"]
    assert command[-3] == "--"


def test_the_head_takes_the_key_and_a_worker_needs_none(healthy, key_file):
    nodes = [{**part.model_dump(), "python": "/python"} for part in healthy.config.nodes]
    settings = {"nodes": nodes, "key_file": str(key_file), "device": "embedded", "profile": "", "model": ""}
    split = ClusterConfig.model_validate({**healthy.config.model_dump(by_alias=True), **settings})
    assert [node.EmbeddedNode(split, part).launch().plan.key for part in split.nodes] == ["sesame", ""]
    containers = split.model_copy(update={"device": "docker"})
    files = [node.ContainerNode(containers, part).env.get("SPARKFORGE_API_KEY") for part in split.nodes]
    assert files == [str(key_file), None]


def test_a_silent_node_is_a_state(asked, capsys):
    config, _, answers = asked
    answers["spark2", "status"] = NetworkError("unreachable", "No route to host", "ssh spark2 true")
    start.show_status(start.status(config))
    assert "spark2  silent   No route to host" in capsys.readouterr().out
