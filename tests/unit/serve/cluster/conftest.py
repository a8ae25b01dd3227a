"""Recorded facts of nodes, and the situation of two healthy Sparks that a test breaks in one place."""

from pathlib import Path

import pytest

from sparkforge.models import table as models
from sparkforge.plan.architecture import parse
from sparkforge.serve.cluster import discover
from sparkforge.serve.cluster import facts as cluster_facts
from sparkforge.serve.cluster.checks import ClusterFacts
from sparkforge.serve.cluster.facts import Reach

SHEETS = Path(__file__).with_name("sheets")
IMAGE, MODEL = "sha256:" + "1" * 64, "2" * 64


@pytest.fixture
def sheet():
    """Return a function: a sheet's name → facts by the node's name."""
    return lambda name: cluster_facts.load_sheet(SHEETS / f"{name}.json")


@pytest.fixture
def healthy(sheet):
    """Two Sparks with nothing wrong: eugr's, with one image and one model."""
    facts = {
        name: node.model_copy(update={"image": IMAGE, "model": MODEL}) for name, node in sheet("two-from-eugr").items()
    }
    config = discover.propose(facts, {"spark": "", "spark2": "spark2"}).model_copy(update={"model": "/models/gpt"})
    reach = Reach(sent=50, fastest=5e-5)
    reaches = {("spark", "spark2"): reach, ("spark2", "spark"): reach}
    model = parse(models.load()["gpt-oss-120b"].config, "test")
    return ClusterFacts(config, facts, reaches=reaches, nccl="2.29.7", model=model)
