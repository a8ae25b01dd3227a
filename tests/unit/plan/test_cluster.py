"""Several machines: the weights of each, traffic on the link, speed against separate servers, published figures."""

from dataclasses import replace

import pytest

from sparkforge.models import recipes as models
from sparkforge.plan import budget, cluster, devices, roofline
from sparkforge.plan.architecture import parse
from sparkforge.plan.budget import Workload

BIG = parse(models.load()["gpt-oss-120b"].config, "test")
SPARK = devices.table()["spark"]
LOAD = Workload(8192, 4, sequences=16)


def make(nodes=2, load=LOAD, model=BIG):
    return cluster.make(model, SPARK, load, nodes)


def test_two_machines_hold_half_of_the_weights_each_and_send_two_hidden_states_a_layer():
    rows = {row.way: row for row in make().ways}
    alone = budget.share_lines(BIG, SPARK, LOAD)[0].bytes
    whole = 36 * 2 * (128 * 2880 + 128) + 73 * 2880 * 2  # router and norms
    padding = 36 * 128 * (3 * 2944 * 1536 - 3 * 2880 * 1440) * 17 / 32  # 1440 columns an expert, padded to 128s
    assert rows["tensor"].weights_bytes == pytest.approx((alone - whole) / 2 + whole + padding, rel=1e-3)
    assert rows["tensor"].link_bytes == 73 * 2 * 2880 + 2 * 201088 / 2
    assert rows["pipeline"].link_bytes == 2 * 2 * 2880
    assert rows["replicas"].link_bytes == 0
    assert rows["replicas"].share < 0.87
    assert all(row.fits for row in rows.values())


def test_an_all_reduce_takes_the_cited_latency_and_beyond_it_the_bandwidth():
    link = SPARK.link
    assert cluster.reduce_seconds(link, 5760, 2) == pytest.approx(35.15e-6)
    assert cluster.reduce_seconds(link, 24576, 2) == pytest.approx((31.67 + 39.56) / 2 * 1e-6)
    assert cluster.reduce_seconds(link, 65536 + 23_700_000, 2) == pytest.approx(67.93e-6 + 1e-3)
    assert cluster.reduce_seconds(link, 5760, 4) == pytest.approx(3 * 35.15e-6)


def test_one_user_gains_by_the_half_of_the_bytes_and_pays_for_the_link():
    row = cluster.speeds(BIG, SPARK, LOAD, 2, 1)
    work = roofline.decode(BIG, 1, LOAD)
    link = cluster.link_seconds(BIG, SPARK.link, 1, 2, "tensor")
    assert row.single == pytest.approx(273e9 / work.bytes)
    assert 1 / row.ways["tensor"] == pytest.approx(work.bytes / 2 / 273e9 + link, rel=0.01)
    assert link == pytest.approx(73 * 35.15e-6 + cluster.reduce_seconds(SPARK.link, 201088, 2))
    assert row.ways["replicas"] == row.single  # the other machine has nothing to do
    assert row.ways["pipeline"] < row.single


def test_separate_servers_are_faster_once_one_server_is_full():
    planned = make()
    assert 16 < planned.crossover <= 32  # --max-num-seqs is 16
    before, after = (cluster.speeds(BIG, SPARK, LOAD, 2, users).ways for users in (16, 32))
    assert before["tensor"] > before["replicas"]
    assert after["tensor"] == before["tensor"] < after["replicas"]
    assert planned.recommended == "tensor"
    assert make(load=replace(LOAD, concurrency=64)).recommended == "replicas"


@pytest.mark.parametrize(
    ("nodes", "way", "objection"),
    [
        (3, "tensor", "64 heads"), (3, "expert", "128 experts"), (64, "pipeline", "36 layers"),
        (7, "pipeline", "size of 2880"), (3, "pipeline", ""), (2, "tensor", ""),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_split_gives_the_reason(nodes, way, objection):
    assert objection in " ".join(cluster.objections(BIG, nodes, way))
    assert bool(objection) == (cluster.total(BIG, SPARK, LOAD, nodes, 8, way) is None)
