"""The measurements without a GPU: figures on a CPU, the reading kernel, and one-line errors.

On a GPU every row of ours and of a peer has its error against float32, which shows whether the measured kernel is
right.
"""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

import measure_experts
import measure_formats
import measure_shards
from measure_formats import DRAWS, STATES_SEED, measure, pieces
from project import PROJECT
from spark_mxfp4.kernels.check import LayerSizes, error, random_routing, random_weights, reference
from spark_mxfp4.kernels.linear import Format
from spark_mxfp4.kernels.linear import reference as rounded

PROGRAMS = ("measure_experts", "measure_linear", "measure_shards")
READ = """
import torch
import measure_linear as m
m._processors = lambda device: 3
m.LAUNCHES = (m.ReadLaunch(32, 2, 1), m.ReadLaunch(64, 1, 2))
for launch in m.LAUNCHES:
    block = launch.threads * m.THREAD_WORDS
    for count in (4, block, 7 * block + 4):
        for place in {0, count // 2, count - 1}:
            words, out = torch.zeros(count, dtype=torch.int32), torch.zeros(m.MOST_WORDS, dtype=torch.int32)
            words[place] = 0x5EED5EED  # cancels if read twice
            m.read(words, out, launch, early=False)
            assert out.nonzero().flatten().tolist() == [place % block], (launch, count, place)
print("every word once")
"""


def run(monkeypatch, program, *arguments):
    module = importlib.import_module(program)
    monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
    module.main()


TOKENS = "is no list of whole numbers above 0 · give them as in 1,64"


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((f"--tokens={tokens}",), f"{tokens!r} {TOKENS}") for tokens in ("1,x", "0", "", "-1", "1.5")),
        (("--output", "none/f.json"), "mkdir -p none"),
    ],
)
def test_invalid_arguments_give_a_one_line_error_before_the_measurement(
    monkeypatch, capsys, program, arguments, message
):
    with pytest.raises(SystemExit, check=lambda refused: refused.code == 2):
        run(monkeypatch, program, "--output", "f.json", *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("measure_experts", ("--experts", "7"), "no model has 7 experts · they have 128, 32"),
        ("measure_experts", (), "torch sees no NVIDIA GPU"),
        ("measure_linear", ("--shapes", "qkv,tail"), "cannot measure tail"),
        ("measure_shards", (), r"sees 0 NVIDIA GPUs.*run bench/measure_experts\.py --output"),
    ],
)
def test_invalid_requests_give_an_error_that_names_them(monkeypatch, claim_gpu, tmp_path, program, arguments, message):
    claim_gpu(device_count=0)
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, program, "--output", tmp_path / "f.json", *arguments)


def test_a_failed_peer_is_recorded_and_our_rows_stay(tmp_path, monkeypatch, claim_gpu):
    claim_gpu(is_available=True, get_device_name="a GPU", empty_cache=None)
    monkeypatch.setattr(measure_experts, "ceilings", lambda: {"copy_gbs": 1.0})
    monkeypatch.setattr(measure_experts, "measure_ours", lambda model, tokens, *_: [{"tokens": n} for n in tokens])
    monkeypatch.setitem(sys.modules, "peer_cutlass", None)
    run(monkeypatch, "measure_experts", "--output", tmp_path / "f.json", "--tokens", "1,8", "--experts", "32",
        "--peer-cutlass")  # fmt: skip
    model = json.loads((tmp_path / "f.json").read_text())["models"]["gpt-oss-20b"]
    assert model["ours"] == [{"tokens": 1}, {"tokens": 8}]
    assert model["peer_cutlass_failed"].startswith("ModuleNotFoundError")


def test_figures_of_formats_are_those_of_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(measure_formats, "PIECE", 64)
    rows = measure(200, 96, DRAWS["heavy-tailed"], 16)
    assert [(row["states"], row["format"]) for row in rows] == [(s, f.name) for s in DRAWS for f in Format]
    whole = torch.cat(list(pieces(200, 96, DRAWS["heavy-tailed"])))
    x = DRAWS["normal"](16, 96, torch.Generator().manual_seed(STATES_SEED)).bfloat16().float()
    exact = x @ whole.float().T
    for row in rows[: len(Format)]:
        packed = rounded(whole, Format[row["format"]])
        products = x @ packed.T
        assert row["weight_error"] == pytest.approx(float((packed - whole.float()).norm() / whole.float().norm()))
        assert row["product_error"] == pytest.approx(float((products - exact).norm() / exact.norm()), rel=1e-4)
        assert row["top1"] == float((products.argmax(1) == exact.argmax(1)).float().mean())
        assert row["top1"] <= row["top1_in_5"] <= 1


def test_the_reading_kernel_reads_every_word_once():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PROJECT / "bench")}
    result = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "every word once\n", result.stderr


@pytest.mark.parametrize("split", measure_shards.SPLITS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_shards_of_two_gpus_add_up_to_the_layer(split, bias):
    sizes = LayerSizes(4, 2, 64, 128)
    weights = random_weights(sizes.experts, sizes.hidden, sizes.intermediate, "cpu", bias=bias)
    x, (ids, shares) = torch.randn(5, 64).bfloat16(), random_routing(5, 4, 2, device="cpu")
    total = torch.zeros(5, 64)
    for rank in range(measure_shards.GPUS):
        own, expert_map = measure_shards.shard(weights, split, rank)
        if split == "expert":
            assert expert_map.tolist() == [[0, 1, -1, -1], [-1, -1, 0, 1]][rank]
            total += reference(x, weights, ids, shares, [2 * rank, 2 * rank + 1])
        else:
            assert expert_map is None
            total += reference(x, own, ids, shares)
    assert error(total, reference(x, weights, ids, shares)) < 1e-5
