"""Independent servers behind one endpoint: their settings, what is asked of which node, and each server's command."""

import pytest

from sparkforge.core.errors import ServerError
from sparkforge.core.openai import Endpoint
from sparkforge.serve.cluster import checks, config, node, start

ADDRESSES = ("192.168.177.11", "192.168.177.12")


def changed(original, **changes):
    """Return a configuration that was read with these settings."""
    return config.ClusterConfig.model_validate({**original.model_dump(by_alias=True), **changes})


@pytest.fixture
def replicas(healthy, tmp_path):
    key = tmp_path / "key"
    key.write_text("key-of-a-test")
    key.chmod(0o600)
    settings = {"mode": "replicas", "tensor": 1, "key_file": str(key), "device": "embedded", "profile": "", "model": ""}
    return changed(healthy.config, **settings)


def test_a_replica_is_a_whole_server_on_its_address_with_the_key(replicas, monkeypatch, tmp_path):
    nodes = tuple(part.model_copy(update={"python": "/python"}) for part in replicas.nodes)
    described = node.EmbeddedNode(replicas.model_copy(update={"nodes": nodes}), nodes[1]).launch()
    assert (described.plan.host, described.plan.port, described.plan.key) == (ADDRESSES[1], 8001, "key-of-a-test")
    assert not [word for word in described.command if "nnodes" in word or "headless" in word or "watch" in word]
    hosts = described.environment["SPARKFORGE_ALLOWED_HOSTS"].split(",")
    assert {"127.0.0.1:8000", f"{ADDRESSES[1]}:8001"} <= set(hosts)  # through the balancer, and for its own proof


def test_a_split_models_head_takes_the_key_and_its_worker_needs_none(replicas, monkeypatch, tmp_path):
    split = changed(replicas, mode="split", tensor=2)
    nodes = tuple(part.model_copy(update={"python": "/python"}) for part in split.nodes)
    split = split.model_copy(update={"nodes": nodes})
    keys = [node.EmbeddedNode(split, part).launch().plan.key for part in nodes]
    assert keys == ["key-of-a-test", ""]


def test_a_server_with_another_key_is_named(replicas, monkeypatch):
    monkeypatch.setattr(
        Endpoint, "accepts_key", lambda self: (self.url, self.key) != (f"http://{ADDRESSES[1]}:8001", "key-of-a-test")
    )
    with pytest.raises(ServerError, match="spark2 does not take the API key"):
        node.answer(node.NodeRequest(action="start", name="balancer", config=replicas))


def test_servers_start_together_and_the_balancer_after_them(replicas, healthy, monkeypatch):
    questions = []

    def ask(_config, part, action, **_more):
        questions.append((part.name, action))
        return {"verdict": "serve", "url": "http://x", "state": "stopped"}

    monkeypatch.setattr(start, "ask", ask)
    monkeypatch.setattr(checks, "look", lambda _config: healthy)
    monkeypatch.setattr(start, "haproxy", lambda: "haproxy")
    assert start.up(replicas)["url"] == "http://x"
    assert sorted(questions[2:4]) == [("spark", "start"), ("spark2", "start")]
    assert questions[4:] == [("balancer", "start")]
    questions.clear()
    start.renew(replicas, replicas.nodes[1])
    assert questions == [("spark2", "down"), ("spark2", "validate"), ("spark2", "start")]
    start.down(replicas)
    assert sorted(questions[3:]) == [("balancer", "down"), ("spark", "down"), ("spark2", "down")]
