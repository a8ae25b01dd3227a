"""Recorded facts of nodes, and facts of two healthy Sparks in which a test breaks one fact."""

import json
from pathlib import Path

import pytest
from programs import write_program

from sparkforge.models import recipes as models
from sparkforge.plan.architecture import parse
from sparkforge.serve.cluster import discover
from sparkforge.serve.cluster.checks import ClusterFacts
from sparkforge.serve.cluster.remote import NodeFacts, Reach

SHEETS = Path(__file__).with_name("sheets")
IMAGE, MODEL = "sha256:" + "1" * 64, "2" * 64


@pytest.fixture
def sheet():
    def read(name):
        nodes = json.loads((SHEETS / f"{name}.json").read_text())["nodes"]
        return {node: NodeFacts.model_validate(facts) for node, facts in nodes.items()}

    return read


@pytest.fixture
def healthy(sheet):
    facts = {
        name: node.model_copy(update={"image": IMAGE, "model": MODEL}) for name, node in sheet("two-from-eugr").items()
    }
    config = discover.propose(facts, {"spark": "", "spark2": "spark2"}).model_copy(update={"model": "/models/gpt"})
    reach = Reach(sent=50, fastest=5e-5)
    reaches = {("spark", "spark2"): reach, ("spark2", "spark"): reach}
    model = parse(models.load()["gpt-oss-120b"].config, "test")
    return ClusterFacts(config, facts, reaches=reaches, model=model)


@pytest.fixture
def answering(healthy, tmp_path, monkeypatch):
    """Return a function that makes a cluster on `device`; its ssh and docker print `text` for any command."""

    def make(text, device="embedded"):
        (tmp_path / "answer").write_text(text)
        for name in ("ssh", "docker"):
            write_program(tmp_path / "answers" / name, f"exec cat {tmp_path}/answer")
        monkeypatch.setenv("PATH", f"{tmp_path}/answers", prepend=":")
        nodes = tuple(node.model_copy(update={"ssh": node.name}) for node in healthy.config.nodes)
        return healthy.config.model_copy(update={"nodes": nodes, "device": device, "model": ""})

    return make
