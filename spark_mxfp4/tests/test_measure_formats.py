"""What formats cost in accuracy: the figures of small matrices against plain products."""

import json

import pytest
import torch

import measure_formats
from measure_formats import DRAWS, STATES_SEED, measure, pieces
from spark_mxfp4.kernels.linear import Format, reference


def test_figures_are_those_of_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(measure_formats, "PIECE", 64)
    rows = measure(200, 96, DRAWS["heavy-tailed"], 16)
    assert [(row["states"], row["format"]) for row in rows] == [
        (states, format_.name) for states in DRAWS for format_ in Format
    ]
    whole = torch.cat(list(pieces(200, 96, DRAWS["heavy-tailed"])))
    x = DRAWS["normal"](16, 96, torch.Generator().manual_seed(STATES_SEED)).bfloat16().float()
    exact = x @ whole.float().T
    for row in rows[: len(Format)]:
        packed = reference(whole, Format[row["format"]])
        products = x @ packed.T
        assert row["weight_error"] == pytest.approx(float((packed - whole.float()).norm() / whole.float().norm()))
        assert row["product_error"] == pytest.approx(float((products - exact).norm() / exact.norm()), rel=1e-4)
        assert row["top1"] == float((products.argmax(1) == exact.argmax(1)).float().mean())
        assert row["top1"] <= row["top1_in_5"] <= 1


def test_four_bits_lose_more_than_eight_and_states_are_not_the_weights():
    rows = {row["format"]: row for row in measure(256, 256, DRAWS["normal"], 64) if row["states"] == "normal"}
    assert rows["MXFP4"]["weight_error"] > 3 * rows["MXFP8"]["weight_error"] > 0.05
    for row in rows.values():  # independent numbers: a state that equals a row of weights would lower it
        assert row["product_error"] == pytest.approx(row["weight_error"], rel=0.05)


def test_the_draws_have_variance_one_and_different_tails():
    generator = torch.Generator().manual_seed(3)
    drawn = {name: draw(500, 500, generator) for name, draw in DRAWS.items()}
    assert drawn["normal"].var() == pytest.approx(1, rel=0.02)
    assert drawn["heavy-tailed"].var() == pytest.approx(1, rel=0.3)  # its fourth moment is infinite
    assert drawn["heavy-tailed"].abs().max() > 4 * drawn["normal"].abs().max()


def test_the_command_writes_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure_formats, "SHAPES", {"small": (64, 64)})
    monkeypatch.setattr("sys.argv", ["measure_formats", "--output", str(tmp_path / "f.json"), "--states", "8"])
    measure_formats.main()
    result = json.loads((tmp_path / "f.json").read_text())
    assert set(result["shapes"]) == {f"small, {name} weights" for name in DRAWS}
    assert "MXFP4" in capsys.readouterr().out
