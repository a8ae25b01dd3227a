"""The GPU serving benchmark against a stand-in server: counts, refusals, and what stands in for a checkpoint."""

import importlib.metadata
import json

import pytest
import torch
from expected import refused
from loopback import Quiet, serving

from lab.served import dummy, random_weights, serve_gpu
from spark_mxfp4.vllm import plugin
from sparkforge.plan.architecture import parse


class Server(Quiet):
    def post(self):
        body = json.loads(self.body())
        self.server.seen.append(body)
        self.server.now += 1
        self.server.most = max(self.server.most, self.server.now)
        self.stream()
        events = [{"choices": [{"text": ""}]} for _ in range(body["max_tokens"] - 1)]  # two tokens in one event
        events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}})
        lines = [*(f"data: {json.dumps(event)}" for event in events), "data: [DONE]", ""]
        self.wfile.write("\n\n".join(lines).encode())
        self.server.now -= 1


@pytest.fixture
def server():
    with serving(Server, seen=[], now=0, most=0) as stub:
        yield stub


def test_tokens_come_from_the_servers_usage_and_requests_are_kept_in_flight(server):
    row = serve_gpu._load(f"http://127.0.0.1:{server.server_port}", 3, 12, 10, 8)
    assert (row["requests"], row["complete"]) == (12, True)
    assert 12 * 8 / row["output_tokens_per_s"] == pytest.approx(row["seconds"], abs=0.0006)  # rounded to 0.001
    assert len(server.seen) == 12
    assert server.most <= 3
    assert all(len(body["prompt"]) == 10 and body["max_tokens"] == 8 and body["ignore_eos"] for body in server.seen)
    assert len({tuple(body["prompt"]) for body in server.seen}) == 12


def test_a_server_that_took_another_backend_is_refused(tmp_path):
    log = tmp_path / "log"
    log.write_text("INFO Using 'MARLIN' Mxfp4 MoE backend.\n")
    assert serve_gpu._chosen("marlin", log) == "Using 'MARLIN' Mxfp4 MoE backend."
    with refused("server.start", "did not take spark"):
        serve_gpu._chosen("spark", log)


def test_random_weights_fill_experts_and_leave_the_rest():
    names = {"e.w13_weight": torch.uint8, "e.w2_weight_scale": torch.uint8, "x_norm.weight": torch.bfloat16,
             "router.weight": torch.bfloat16, "router.bias": torch.bfloat16, "attn": torch.bfloat16}  # fmt: skip
    tensors = {name: torch.full((64, 64), 3).to(dtype) for name, dtype in names.items()}
    random_weights.fill((name, torch.nn.Parameter(t, requires_grad=False)) for name, t in tensors.items())
    assert len(tensors["e.w13_weight"].unique()) == 256
    assert tensors["e.w2_weight_scale"].unique().tolist() == list(range(*random_weights.SCALES))
    assert tensors["router.weight"].float().std() == pytest.approx(random_weights.ROUTER_DEVIATION, rel=0.1)
    assert [tensors[n].unique().tolist() for n in list(names)[2::2]] == [[1.0], [0.0]]
    assert tensors["attn"].unique().tolist() == [3.0]


def test_python_finds_the_load_formats_entry_point(tmp_path):
    random_weights.write_entry_point(tmp_path)
    (package,) = importlib.metadata.distributions(path=[str(tmp_path)])
    plugins = {entry_point.name: entry_point for entry_point in package.entry_points}
    assert {entry_point.group for entry_point in plugins.values()} == {"vllm.general_plugins"}
    assert plugins[random_weights.PLUGIN].load() == random_weights.register
    assert plugins["spark_mxfp4"].load() == plugin.register


@pytest.mark.parametrize(("size", "layers", "experts", "billions"), [("20b", 24, 32, 20.9), ("120b", 36, 128, 116.8)])
def test_a_configuration_without_weights_has_the_published_number_of_parameters(size, layers, experts, billions):
    config = dummy.config(size)
    assert (config["num_hidden_layers"], len(config["layer_types"]), config["num_local_experts"]) == (
        layers,
        layers,
        experts,
    )
    total = sum(part.count + part.plain for part in parse(config, "test").parts())
    assert total / 1e9 == pytest.approx(billions, abs=0.05)  # gpt-oss model card, table 1: 20.91 and 116.83
