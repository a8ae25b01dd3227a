"""vLLM's own loader of gpt-oss with our experts: every name, every rank's share, refused input; no server starts.

These tests run on the installed release; test_vllm_releases.py runs them on the other releases that the plugin
supports.
"""

import dataclasses
import gc
import json
import os
import pickle
import re
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_families
import tiny_random
import torch
import vllm
import vllm.platforms
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.quantization import QuantizationConfigArgs
from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization import mxfp4 as stock
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.v1.attention.backends import registry as backends

from spark_mxfp4 import registry
from spark_mxfp4.experts import ExpertWeights, Projection, moe
from spark_mxfp4.kernels import linear as dense_kernels
from spark_mxfp4.kernels.attention import rotated as rotated_by_kernels
from spark_mxfp4.kernels.check import error
from spark_mxfp4.kernels.linear import Format, Weight, reference
from spark_mxfp4.mxfp4 import dequantize, quantize
from spark_mxfp4.vllm import attention, norms, plugin, router, versions
from spark_mxfp4.vllm import experts as vllm_experts
from spark_mxfp4.vllm import linear as vllm_linear
from sparkforge import pins
from sparkforge.core.paths import ROOT
from sparkforge.models.tiny import config
from sparkforge.plan import families
from validate.facts import deep_child

pytestmark = pytest.mark.integration
SMALL = {
    "hidden_size": 64, "intermediate_size": 2880, "num_hidden_layers": 1, "num_local_experts": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 2, "experts_per_token": 2,
}  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts."
VOCABULARY = 201088
# openai/gpt-oss-20b and -120b, config.json.
OPENAI = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
SIZES = {
    "20b": {**OPENAI, "num_hidden_layers": 24, "num_local_experts": 32},
    "120b": {**OPENAI, "num_hidden_layers": 36, "num_local_experts": 128},
}


def configuration(**changes):
    merged = {**config(tiny_random.SIZES), **changes}
    kinds = ["sliding_attention", "full_attention"] * merged["num_hidden_layers"]
    return {**merged, "layer_types": kinds[: merged["num_hidden_layers"]]}


def tensors(sizes):
    """Yield name, shape and whether it has bytes, for every tensor of a checkpoint of these sizes."""
    hidden, heads, keys = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    head = sizes["head_dim"]
    yield "model.embed_tokens.weight", (VOCABULARY, hidden), False
    for number in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield f"{layer}input_layernorm.weight", (hidden,), False
        yield f"{layer}post_attention_layernorm.weight", (hidden,), False
        for name, rows in (("q", heads * head), ("k", keys * head), ("v", keys * head)):
            yield f"{layer}self_attn.{name}_proj.weight", (rows, hidden), False
            yield f"{layer}self_attn.{name}_proj.bias", (rows,), False
        yield f"{layer}self_attn.o_proj.weight", (hidden, heads * head), False
        yield f"{layer}self_attn.o_proj.bias", (hidden,), False
        yield f"{layer}self_attn.sinks", (heads,), False
        yield f"{layer}mlp.router.weight", (sizes["num_local_experts"], hidden), False
        yield f"{layer}mlp.router.bias", (sizes["num_local_experts"],), False
        yield from experts(f"{layer}mlp.experts.", sizes)
    yield "model.norm.weight", (hidden,), False
    yield "lm_head.weight", (VOCABULARY, hidden), False


def experts(prefix, sizes):
    number, hidden, inner = sizes["num_local_experts"], sizes["hidden_size"], sizes["intermediate_size"]
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        yield f"{prefix}{name}_blocks", (number, rows, columns // 32, 16), True
        yield f"{prefix}{name}_scales", (number, rows, columns // 32), True
        yield f"{prefix}{name}_bias", (number, rows), False


def inner_columns(inner, ranks, rank):
    width = -(-inner // 32 // ranks) * 32
    return slice(min(rank * width, inner), min((rank + 1) * width, inner))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Set up vLLM's process groups for one process; ranks are faked, because no test communicates between ranks."""
    with set_current_vllm_config(VllmConfig()):
        path = tmp_path_factory.mktemp("group") / "init"
        parallel_state.init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    yield parallel_state
    cleanup_dist_env_and_memory()


@pytest.fixture
def configure(tmp_path):
    """Return a function: config.json → vLLM's configuration as in a server; vLLM loads the plugin itself."""

    def make(changes, **options):
        (tmp_path / "config.json").write_text(json.dumps(configuration(**changes)))
        settings = {
            "quantization": "spark-mxfp4", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512,
            "enforce_eager": True, **options,
        }  # fmt: skip
        return EngineArgs(model=str(tmp_path), **settings).create_engine_config()

    return make


@pytest.fixture
def claim_amx(monkeypatch):
    return lambda amx: monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)


@contextmanager
def as_rank(groups, rank, ranks, way="_TP"):
    """Fake one of several tensor-parallel or data-parallel (and so expert-parallel) ranks in this process."""
    faked = [getattr(groups, way), groups._EP]
    for group in faked:
        group.rank_in_group, group.world_size = rank, ranks
    try:
        yield
    finally:
        for group in faked:
            group.rank_in_group, group.world_size = 0, 1


def build(vllm_config, make, device="cpu"):
    before = torch.get_default_dtype()
    vllm_config.compilation_config.static_forward_context.clear()  # faked ranks have layers with the same names
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with set_current_vllm_config(vllm_config), torch.device(device):
            return make(vllm_config)
    finally:
        torch.set_default_dtype(before)


def whole_model(vllm_config):
    return GptOssForCausalLM(vllm_config=vllm_config)


def traced(forward, backend):
    """Return `forward` for torch.compile, after the models of earlier tests are freed.

    vLLM's handlers of oneDNN, which AVX-512 processors have, raise if they are freed during tracing.
    """
    gc.collect()
    torch.compiler.reset()
    return torch.compile(forward, backend=backend, fullgraph=True)


def test_vllm_is_the_expected_release(configure):
    configure(SMALL)
    release = os.environ.get("SPARKFORGE_TEST_VLLM") or pins.load().component("embedded", "vllm").version
    assert versions.release() == release
    assert release in versions.SUPPORTED
    modules = [module for name, module in sys.modules.items() if name.startswith("vllm.")]
    files = [Path(module.__file__) for module in modules if getattr(module, "__file__", None)]
    assert len(files) > 100
    assert [file for file in files if not file.is_relative_to(Path(vllm.__file__).parent)] == []


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("size", SIZES)
def test_every_tensor_of_openais_checkpoints_finds_its_place(one_process, configure, size, ranks):
    vllm_config = configure(SIZES[size], dtype="bfloat16")
    with as_rank(one_process, ranks - 1, ranks):
        model = build(vllm_config, whole_model, "meta")
        sizes = configuration(**SIZES[size])
        stored = (
            (name, torch.empty(shape, dtype=torch.uint8 if packed else torch.bfloat16, device="meta"))
            for name, shape, packed in tensors(sizes)
        )
        loaded = model.load_weights(stored)
    parameters = dict(model.named_parameters())
    assert loaded == parameters.keys()
    bits = sum(8 * p.nbytes for name, p in parameters.items() if "w13_weight" in name or "w2_weight" in name)
    values = 3 * 2880 * 2880 * sizes["num_local_experts"] * sizes["num_hidden_layers"]
    # Each of 4 ranks stores 23 blocks, 92 in all, of 90.
    assert bits / values == pytest.approx(4.25 * (92 / 90 / 4 if ranks == 4 else 1))


@pytest.fixture(scope="module")
def stored():
    """One layer's experts in the checkpoint's form and in the reference's form."""
    torch.manual_seed(7)
    tensors = {}
    for name, shape, packed in experts(EXPERTS, configuration(**SMALL)):
        low, high = (119, 123) if name.endswith("_scales") else (0, 256)
        tensors[name] = torch.randint(low, high, shape, dtype=torch.uint8) if packed else torch.randn(shape).bfloat16()
    projections = []
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales, bias = (tensors[f"{EXPERTS}{name}_{kind}"] for kind in ("blocks", "scales", "bias"))
        projections.append(Projection(blocks.flatten(-2), scales, bias.float()))
    return SimpleNamespace(tensors=tensors, weights=ExpertWeights(*projections))


def load_model(vllm_config, tensors):
    model = build(vllm_config, whole_model)
    model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    return model


def load_layer(vllm_config, stored):
    return load_model(vllm_config, stored.tensors).model.layers[0].mlp.experts.routed_experts


def routing(number):
    torch.manual_seed(11)
    shares, ids = torch.topk(torch.rand(23, number), 2)
    return torch.randn(23, 64), ids.int(), shares


def check_ranks(groups, vllm_config, stored, ranks, check, way="_TP"):
    """Load each rank's experts, check them, and compare the sum of all ranks' outputs with the reference."""
    x, ids, shares = routing(4)
    total, layers = torch.zeros_like(x), []
    for rank in range(ranks):
        vllm_config.parallel_config.data_parallel_rank = rank if way == "_DP" else 0
        with as_rank(groups, rank, ranks, way):
            layer = load_layer(vllm_config, stored)
        check(layer, rank)
        layer.quant_method.process_weights_after_loading(layer)
        total += layer.quant_method.apply(layer, x, shares, ids, None, None)
        layers.append(layer)
    torch.testing.assert_close(total, moe(x, stored.weights, ids, shares), rtol=1e-4, atol=1e-3)
    return layers


@pytest.mark.parametrize("mode", ["packed", "dequant"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_vllms_router_and_our_experts_agree_with_the_reference(
    one_process, configure, stored, monkeypatch, mode, backend
):
    monkeypatch.setenv("SPARK_MXFP4_MODE", mode)
    vllm_config = configure(SMALL)
    model = load_model(vllm_config, stored.tensors)
    experts = model.model.layers[0].mlp.experts
    experts.routed_experts.quant_method.process_weights_after_loading(experts.routed_experts)
    torch.manual_seed(3)
    x, logits = torch.randn(7, 64), torch.randn(7, 4)

    def forward(x, logits):
        return experts(x, logits)

    forward = traced(forward, backend) if backend else forward
    with set_forward_context(None, vllm_config, num_tokens=7):
        output = forward(x, logits)
    shares, ids = logits.topk(2)
    expected = moe(x, stored.weights, ids.int(), shares.softmax(-1))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-3)


@pytest.fixture
def fused_router(monkeypatch):
    """Select our router kernel; restore vLLM's router layer afterwards."""
    monkeypatch.setenv("SPARK_MXFP4_ROUTER", "fused")
    yield
    op_registry_oot.pop("GateLinear", None)
    router.replace_routers.cache_clear()


@pytest.mark.parametrize("backend", [None, "eager", "inductor"])
def test_routes_in_place_of_logits_give_the_same_output(one_process, configure, stored, fused_router, backend):
    vllm_config = configure(SMALL)
    model = load_model(vllm_config, stored.tensors)
    block = model.model.layers[0].mlp
    assert type(block.router).__name__ == "SparkGateLinear"
    assert block.experts.is_monolithic
    torch.manual_seed(5)
    for parameter in (block.router.weight, block.router.bias):
        parameter.data.normal_()
    router_weights = block.router.weight.data.clone(), block.router.bias.data.clone()  # a CPU may move them
    for layer in (block.router, block.experts.routed_experts):
        layer.quant_method.process_weights_after_loading(layer)
    torch.manual_seed(3)
    x = torch.randn(7, 64)
    forward = traced(block.forward, backend) if backend else block.forward
    with set_forward_context(None, vllm_config, num_tokens=7):
        output = forward(x)
    shares, ids = torch.nn.functional.linear(x, *router_weights).topk(2)
    expected = moe(x, stored.weights, ids.int(), shares.softmax(-1))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-3)


def test_wrong_values_and_unsupported_routing_are_refused(monkeypatch):
    monkeypatch.setenv("SPARK_MXFP4_ROUTER", "fast")
    with pytest.raises(ValueError, match="must be one of vllm, fused"):
        plugin.fused(plugin.ROUTER_VARIABLE)
    monkeypatch.setenv("SPARK_MXFP4_FAMILIES", "yes")
    with pytest.raises(ValueError, match="it can be on or off"):
        plugin.register()
    # Data-parallel ranks, sequence parallelism, scores, whether shares sum to 1.
    for facts in ((2, False, "softmax", True), (1, True, "softmax", True), (1, False, "sigmoid", True),
                  (1, False, "softmax", False)):  # fmt: skip
        dp_size, sequence_parallel, scoring_func, renormalize = facts
        parallel = SimpleNamespace(dp_size=dp_size)
        moe_config = SimpleNamespace(moe_parallel_config=parallel, pcp_size=1, is_sequence_parallel=sequence_parallel)
        layer = SimpleNamespace(moe_config=moe_config, scoring_func=scoring_func, renormalize=renormalize)
        with pytest.raises(NotImplementedError, match=r"SPARK_MXFP4_ROUTER=fused cannot route this model"):
            router.refuse_unsupported(layer)


@pytest.fixture
def fused_attention(monkeypatch):
    """Select our attention kernel; restore vLLM's backend, norms and rotary embeddings afterwards."""
    monkeypatch.setenv("SPARK_MXFP4_ATTENTION", "fused")
    rotary_embedding._ROPE_DICT.clear()
    yield
    rotary_embedding._ROPE_DICT.clear()
    backends._ATTN_OVERRIDES.clear()
    op_registry_oot.pop("RMSNorm", None)
    attention.replace_norms.cache_clear()


def test_fused_attention_takes_flash_attentions_place_in_every_process(configure, fused_attention):
    quantization = configure(SMALL).quant_config
    backends._ATTN_OVERRIDES.clear()
    pickle.loads(pickle.dumps(quantization))  # noqa: S301 (as another process gets it)
    chosen = backends.AttentionBackendEnum.FLASH_ATTN.get_class()
    assert chosen.__name__ == "SparkAttentionBackend"
    assert chosen.forward_includes_kv_cache_update


def test_attention_takes_over_the_rotary_embedding_of_models_without_a_draft(configure, fused_attention):
    config = configure(SMALL)
    yarn = {"rope_theta": 150000.0, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    positions, query, key = torch.arange(3), torch.randn(3, 128), torch.randn(3, 64)
    with set_current_vllm_config(config):
        embedding = rotary_embedding.get_rope(64, 131072, rope_parameters=yarn, dtype=torch.float32)
        rotated = embedding.forward_native(positions, query.clone(), key.clone())[0]
        rotation = attention._take_over_rotation(config)
        assert rotation.dtype == torch.float32
        assert embedding(positions, query, key) == (query, key)
        ours = rotated_by_kernels(query.view(3, 2, 64).bfloat16(), rotation, positions)
        torch.testing.assert_close(ours.view(3, 128).float(), rotated, rtol=0.02, atol=0.02)
        config.speculative_config = SimpleNamespace()
        assert attention._take_over_rotation(config) is None
        assert embedding._forward_method == embedding.dispatch_forward(compile_native=False)


def test_norms_on_a_cpu_stay_vllms(configure, fused_attention):
    with set_current_vllm_config(configure(SMALL)):
        expected = RMSNorm(64, dtype=torch.bfloat16)
        attention.replace_norms()
        norm = RMSNorm(64, dtype=torch.bfloat16)
    assert norm.fused
    x, residual = torch.randn(2, 3, 64).bfloat16()
    assert all(map(torch.equal, norm(x, residual.clone()), expected(x, residual.clone())))


@pytest.fixture
def open_sums(monkeypatch, fused_attention, one_process):
    """Configure two faked ranks, whose GPUs share memory, so that the norms add their partial results."""
    inboxes = []

    def buffers(size, group):
        assert group is one_process.get_tp_group().cpu_group
        inboxes.extend(torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        return [inbox.data_ptr() for inbox in inboxes]

    monkeypatch.setenv("SPARK_MXFP4_REDUCTION", "fused")
    monkeypatch.setattr(norms, "obstacle", lambda _config: "")
    monkeypatch.setattr(CustomAllreduce, "create_shared_buffer", buffers)
    with as_rank(one_process, 1, 2):
        yield
    op_registry_oot.pop("RowParallelLinear", None)
    norms.ranks.cache_clear()
    norms.leave_sums_open.cache_clear()


def test_layers_of_several_ranks_leave_their_sums_to_the_norms(configure, stored, open_sums, monkeypatch):
    config = configure(SMALL)
    assert load_layer(config, stored).moe_config.skip_final_all_reduce
    with set_current_vllm_config(config):
        assert not RowParallelLinear(64, 64, quant_config=config.quant_config).reduce_results
        norm = RMSNorm(64, dtype=torch.bfloat16)
    assert norm.reduces
    group = norms.ranks()
    assert (len(group.boxes), group.rank, group.buffers.tolist()) == (2, 1, [0] * 64)
    called = []
    monkeypatch.setattr(norms.norm, "reduce_add_rms_norm", lambda *given: called.append(given[-1]) or given[:2])
    monkeypatch.setattr(norms.norm, "add_rms_norm", lambda *given: called.append("norm") or given[:2])
    monkeypatch.setattr(norms, "tensor_model_parallel_all_reduce", lambda x: called.append("sum") or x)
    for tokens in (64, 65):
        norms.reduce_add_rms_norm._init_fn(*torch.ones(2, tokens, 64), torch.ones(64), 1e-5)
    assert called == [group, "sum", "norm"]


def test_one_rank_leaves_no_sum_open(configure, stored, monkeypatch, fused_attention, one_process):
    monkeypatch.setenv("SPARK_MXFP4_REDUCTION", "fused")
    config = configure(SMALL)
    assert not load_layer(config, stored).moe_config.skip_final_all_reduce
    with set_current_vllm_config(config):
        assert RowParallelLinear(64, 64, quant_config=config.quant_config).reduce_results
        assert norms.obstacle(config) == "there is one rank"
        config.parallel_config.tensor_parallel_size = 2
        assert norms.obstacle(config) == "no kernels are compiled for this device"
        config.parallel_config.enable_expert_parallel = True
        assert norms.obstacle(config).startswith("there are pipeline stages, experts of one rank")
    norms.ranks.cache_clear()
    norms.leave_sums_open.cache_clear()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])  # 2880 / 32 = 90 blocks: only 1 and 2 divide them
def test_each_tensor_parallel_rank_gets_its_blocks_and_all_add_up(one_process, configure, stored, ranks):
    columns = [inner_columns(2880, ranks, rank) for rank in range(ranks)]
    assert sum(part.stop - part.start for part in columns) == 2880
    check_ranks(one_process, configure(SMALL), stored, ranks, lambda layer, rank: check_share(
        layer, stored.weights, columns[rank], rank))  # fmt: skip


def check_share(layer, whole, columns, rank):
    """Compare a rank's parameters with slices of the whole: `columns` of the intermediate size, the rest zero."""
    rows = slice(2 * columns.start, 2 * columns.stop)
    wanted = {
        "w13_weight": whole.gate_up.weight[:, rows],
        "w13_weight_scale": whole.gate_up.scales[:, rows],
        "w13_bias": whole.gate_up.bias[:, rows],
        "w2_weight": whole.down.weight[..., columns.start // 2 : columns.stop // 2],
        "w2_weight_scale": whole.down.scales[..., columns.start // 32 : columns.stop // 32],
        "w2_bias": whole.down.bias if rank == 0 else torch.zeros_like(whole.down.bias),  # added once
    }
    for name, part in wanted.items():
        have = getattr(layer, name).data.to(part.dtype, copy=True)
        inside = tuple(slice(size) for size in part.shape)
        assert torch.equal(have[inside], part), name
        have[inside] = 0
        assert not have.any(), f"{name}: padding is not zero"


@pytest.mark.parametrize(("ranks", "way"), [(2, "_TP"), (4, "_TP"), (2, "_DP")])
def test_each_expert_parallel_rank_gets_its_experts_and_all_add_up(one_process, configure, stored, ranks, way):
    """With data parallelism each rank has its own requests; vLLM gives the experts the tokens of all ranks."""

    def check(layer, rank):
        local = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        assert torch.equal(layer.w13_weight, stored.weights.gate_up.weight[local])
        assert torch.equal(layer.w2_weight_scale, stored.weights.down.scales[local])
        assert torch.equal(layer.w2_bias.float(), stored.weights.down.bias[local])
        assert layer.expert_map[local].tolist() == list(range(4 // ranks))
        assert (layer.expert_map == -1).sum() == 4 - 4 // ranks

    options = {"data_parallel_size": ranks} if way == "_DP" else {}
    check_ranks(one_process, configure(SMALL, enable_expert_parallel=True, **options), stored, ranks, check, way)


def test_data_parallel_ranks_without_expert_parallelism_share_the_columns(one_process, configure, stored):
    check_ranks(
        one_process, configure(SMALL, data_parallel_size=2), stored, 2,
        lambda layer, rank: check_share(layer, stored.weights, inner_columns(2880, 2, rank), rank), "_DP",
    )  # fmt: skip


@pytest.fixture
def laid_out(monkeypatch, tmp_path):
    (tmp_path / "vllm_layout_kernels.py").write_text(
        "from spark_mxfp4.experts import ExpertWeights, moe\n"
        "from spark_mxfp4.kernel import MoeKernel\n"
        "def flip(p):\n"
        "    return p._replace(weight=p.weight.flip(0).unsqueeze(1), scales=p.scales.flip(0))\n"
        "class Odd(MoeKernel):\n"
        "    intermediate_alignment = 128\n"
        "    def run(self, x, weights, topk_ids, topk_weights, expert_map=None):\n"
        "        back = [p._replace(weight=p.weight.squeeze(1).flip(0), scales=p.scales.flip(0)) for p in weights]\n"
        "        return moe(x, ExpertWeights(*back), topk_ids, topk_weights, expert_map)\n"
        "    def prepare(self, weights):\n"
        "        return ExpertWeights(*map(flip, weights))\n"
        "    def tune(self, prepared):\n"
        "        self.tuned = prepared.down.weight.shape\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SPARK_MXFP4_KERNEL", "vllm_layout_kernels:Odd")


def test_a_kernels_layout_takes_the_place_of_the_loaded_bytes(one_process, configure, stored, laid_out):
    def check(layer, rank):  # 720 columns become 736 by whole blocks, and 768 by this kernel's alignment
        assert layer.w2_weight.shape == (4, 64, 384)

    for layer in check_ranks(one_process, configure(SMALL), stored, 4, check):
        assert layer.w2_weight.shape == layer.quant_method.kernel.tuned == (4, 1, 64, 384)


def test_the_compile_cache_knows_kernel_and_mode(one_process, configure, stored):
    vllm_config = configure(SMALL)
    before = vllm_config.compute_hash()
    build(vllm_config, whole_model, "meta")
    assert vllm_config.additional_config["spark_mxfp4"] == ["torch", "packed"]
    assert vllm_config.compute_hash() != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "is a model of type 'llama', not 'gpt_oss'"),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "quant_method is 'fp8'"),
        ({"quantization_config": None}, "its experts are not quantized, not 'mxfp4' · convert it by spark_mxfp4.hf"),
        ({"swiglu_limit": 5.0}, r"swiglu_alpha and swiglu_limit are \(1.702, 5.0\)"),
    ],
)
def test_other_checkpoints_are_refused_by_name(configure, changes, message):
    with pytest.raises(ValueError, match=message):
        configure({**SMALL, **changes})


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.32.1.dev3+g1234567", "0.33.0.post1"])
@pytest.mark.parametrize("quantization", ["spark-mxfp4", None])
def test_another_release_is_refused_by_name(configure, monkeypatch, claim_amx, version, quantization):
    monkeypatch.setattr(vllm, "__version__", version)
    claim_amx(False)  # makes the plugin claim the checkpoint
    shown = re.escape(version.partition("+")[0])
    supported = r"it supports 0\.32\.0 and 0\.33\.0 · pip install 'vllm=="
    with pytest.raises(NotImplementedError, match=f"vLLM {shown} · {supported}"):
        configure(SMALL, quantization=quantization)


def test_an_unknown_kernel_is_refused_before_weights_are_read(configure, monkeypatch):
    monkeypatch.setenv("SPARK_MXFP4_KERNEL", "tritn")
    with pytest.raises(ValueError, match="there is no kernel 'tritn'"):
        configure(SMALL)


@pytest.mark.parametrize(
    ("lora", "activation", "on_input", "expert_parallel", "ranks", "message"),
    [
        (True, "swigluoai", False, False, 1, "LoRA"),
        (False, "silu", False, False, 1, "activation 'silu'"),
        (False, "swigluoai", True, False, 1, "router weights applied to the input"),
        (False, "swigluoai", False, True, 3, "128 experts spread over 3 ranks"),
        (False, "swigluoai", False, True, 4, None),
        (False, "swigluoai", False, False, 3, None),
    ],
)
def test_unsupported_features_are_refused_with_their_name(lora, activation, on_input, expert_parallel, ranks, message):
    layer = torch.nn.Module()
    layer.apply_router_weight_on_input = on_input
    layer.moe_config = SimpleNamespace(
        has_bias=False, is_lora_enabled=lora, num_experts=128, activation=MoEActivation(activation),
        moe_parallel_config=SimpleNamespace(use_ep=expert_parallel, ep_size=ranks),
    )  # fmt: skip
    refusal = pytest.raises(NotImplementedError, match=message) if message else nullcontext()
    with set_current_vllm_config(VllmConfig()), refusal:
        method = vllm_experts.SparkMxfp4MoEMethod(layer.moe_config, registry.load("torch"), "packed")
        method.create_weights(layer, 2, 32, 32, torch.bfloat16)


@pytest.fixture
def families_on(monkeypatch):
    """Turn other families on for the next `plugin.register`; put vLLM's own method back afterwards."""
    monkeypatch.setattr(stock, "Mxfp4MoEMethod", stock.Mxfp4MoEMethod)
    monkeypatch.setenv("SPARK_MXFP4_FAMILIES", "on")


@pytest.fixture
def other_family(families_on, tmp_path):
    plugin.register()
    family = {**tiny_families.CONFIGS["qwen3-moe"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**family, "quantization_config": {"quant_method": "mxfp4"}}))
    options = {"skip_tokenizer_init": True, "max_model_len": 512, "enforce_eager": True}

    def make():
        vllm_config = EngineArgs(model=str(tmp_path), **options).create_engine_config()
        return build(vllm_config, lambda config: Qwen3MoeForCausalLM(vllm_config=config))

    return make


def test_experts_of_another_family_are_loaded_and_multiplied_by_our_kernels(one_process, other_family):
    model = other_family()
    torch.manual_seed(5)
    hidden, inner, number = tiny_families.HIDDEN, tiny_families.WIDTH, tiny_families.EXPERTS
    kinds = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    dense = {kind: torch.randn(number, *shape) for kind, shape in kinds.items()}
    packed = {kind: quantize(values) for kind, values in dense.items()}
    stored = {kind: {"weight": blocks.flatten(2), "weight_scale": scales} for kind, (blocks, scales) in packed.items()}
    model.load_weights(
        (f"model.layers.0.mlp.experts.{expert}.{kind}.{name}", tensor[expert])
        for kind, tensors in stored.items() for name, tensor in tensors.items() for expert in range(number)
    )  # fmt: skip
    layer = model.model.layers[0].mlp.experts.routed_experts
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(7, hidden).bfloat16()
    shares, ids = torch.randn(7, number).softmax(-1).topk(tiny_families.TOP_K)
    output = layer.quant_method.apply(layer, x, shares, ids.int(), None, None)
    gate, up, down = (dequantize(*packed[kind]) for kind in kinds)
    expected = torch.zeros(7, hidden)
    for token, values in enumerate(x.float()):
        for expert, weight in zip(ids[token], shares[token], strict=True):
            inside = torch.nn.functional.silu(gate[expert] @ values) * (up[expert] @ values)
            expected[token] += weight * (down[expert] @ inside)
    assert error(output, expected) < 0.006  # bfloat16 between the products


def test_a_kernel_for_gpt_oss_alone_refuses_another_family(one_process, other_family, monkeypatch):
    monkeypatch.setenv("SPARK_MXFP4_KERNEL", "spark_mxfp4.template.own_kernel:OwnKernel")
    with pytest.raises(NotImplementedError, match="its kernels do not support the activation 'silu'"):
        other_family()


def test_experts_of_another_family_that_are_left_to_vllm_are_its_own(families_on, monkeypatch):
    before = stock.Mxfp4MoEMethod
    monkeypatch.setenv("SPARK_MXFP4_KERNEL", "vllm")
    plugin.register()
    assert stock.Mxfp4MoEMethod is before


def test_a_kernel_with_a_layout_refuses_dense_experts(laid_out):
    with pytest.raises(ValueError, match="set SPARK_MXFP4_MODE=packed"):
        vllm_experts._refuse_unfit(registry.load(), "dequant")


@pytest.mark.parametrize(
    ("kernel", "graphs", "refused"),
    [("torch", "FULL_AND_PIECEWISE", True), ("torch", "NONE", False), ("vllm_layout_kernels:Odd", "FULL", False)],
)
def test_on_cuda_a_kernel_that_waits_is_refused_in_graphs(monkeypatch, laid_out, kernel, graphs, refused):
    monkeypatch.setattr(vllm_experts, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    vllm_config = VllmConfig()
    vllm_config.compilation_config = CompilationConfig(cudagraph_mode=graphs)
    refusal = pytest.raises(ValueError, match=r"cannot be held in CUDA graphs · .* · add --enforce-eager")
    with set_current_vllm_config(vllm_config), refusal if refused else nullcontext():
        vllm_experts._refuse_unfit(registry.load(kernel), "packed")


@pytest.mark.parametrize(("cuda", "cpu", "device"), [(True, False, "cuda"), (False, True, "cpu"), (False, False, None)])
def test_the_platform_chooses_the_kernel_or_is_refused(monkeypatch, cuda, cpu, device):
    platform = SimpleNamespace(is_cuda=lambda: cuda, is_cpu=lambda: cpu, device_name="xpu")
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    monkeypatch.delenv("SPARK_MXFP4_KERNEL", raising=False)
    if device is None:
        with pytest.raises(NotImplementedError, match="cannot run on xpu"):
            plugin.device_type()
    else:
        assert registry.chosen_name(plugin.device_type()) == {"cuda": "triton", "cpu": "torch"}[device]


# Dense formats: attention's projections and the LM head in 4 or 8 bits.

DENSE = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 32}
DENSE_LAYERS = ("model.layers.0.attn.qkv_proj", "model.layers.0.attn.o_proj", "lm_head")


@pytest.fixture(scope="module")
def checkpoint():
    torch.manual_seed(19)
    stored = {}
    for name, shape, packed in tensors(configuration(**DENSE)):
        dense = torch.randn(shape).pow(3).bfloat16() / 64
        stored[name] = torch.randint(110, 120, shape, dtype=torch.uint8) if packed else dense
    return stored


@pytest.fixture
def formats(monkeypatch):
    def choose(linear="", head=""):
        monkeypatch.setenv("SPARK_MXFP4_LINEAR", linear)
        monkeypatch.setenv("SPARK_MXFP4_LM_HEAD", head)

    yield choose
    op_registry_oot.pop("ParallelLMHead", None)
    vllm_linear.show_heads_to_the_configuration.cache_clear()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Make the layers call the GPU kernel, which is replaced by a stand-in that records its calls."""
    calls = []

    def start(x, weight, bias, out):
        calls.append((x, weight, bias))
        out.fill_(2)

    monkeypatch.setattr(vllm_linear, "_runs_our_kernels", lambda _weight: True)
    monkeypatch.setattr(dense_kernels, "_start", start)
    monkeypatch.setattr(dense_kernels, "dense", lambda w: torch.full((w.rows, w.columns), 3.0).bfloat16())
    return calls


def process(model, names=DENSE_LAYERS):
    layers = [model.get_submodule(name) for name in names]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return layers


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("linear", "head"), [("fp8", "mxfp8"), ("mxfp8", "mxfp4"), ("mxfp4", "fp8")])
def test_a_cpu_multiplies_by_the_formats_values(one_process, configure, formats, checkpoint, linear, head, ranks):
    formats(linear, head)
    vllm_config = configure(DENSE)
    for rank in range(ranks):
        with as_rank(one_process, rank, ranks):
            model = load_model(vllm_config, checkpoint)
            # The compile cache knows the format.
            assert vllm_config.additional_config["spark_mxfp4:SPARK_MXFP4_LINEAR"] == linear.upper()
            loaded = [model.get_submodule(name).weight.data.clone() for name in DENSE_LAYERS]
            layers = process(model)
        assert loaded[2].shape == (VOCABULARY // ranks, 64)
        assert torch.equal(loaded[2], checkpoint["lm_head.weight"].float().chunk(ranks)[rank])
        for layer, matrix, name in zip(layers, loaded, (linear, linear, head), strict=True):
            x = torch.randn(5, matrix.shape[1])
            expected = x @ reference(matrix, Format[name.upper()]).T
            torch.testing.assert_close(layer.quant_method.apply(layer, x), expected, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(expected, x @ matrix.T, rtol=1e-3, atol=1e-3)
        embedding = checkpoint["model.embed_tokens.weight"].float().chunk(ranks)[rank]
        assert torch.equal(model.model.embedding.weight, embedding)
        assert model.model.layers[0].mlp.router.weight.dtype == torch.float32


def dense_outputs(layers, x, attended):
    """Return q, k, v, the output projection's product and the logits of this rank."""
    qkv, projection, head = layers
    heads = qkv.quant_method.apply(qkv, x).chunk(3, -1)  # as many key heads as query heads
    return *heads, projection.quant_method.apply(projection, attended), head.quant_method.apply(head, x)


@pytest.mark.parametrize("format_name", ["mxfp8", "mxfp4", "fp8"])
def test_dense_shares_of_two_ranks_equal_one_rank(one_process, configure, formats, checkpoint, format_name):
    formats(format_name, format_name)
    vllm_config = configure(DENSE)
    torch.manual_seed(5)
    x, attended, parts = torch.randn(5, 64), torch.randn(5, 128), []
    for ranks in (1, 2):
        for rank in range(ranks):
            with as_rank(one_process, rank, ranks):
                layers = process(load_model(vllm_config, checkpoint))
            parts.append(dense_outputs(layers, x, attended.chunk(ranks, -1)[rank]))
    whole, *shares = parts
    queries, keys, values, projected, logits = zip(*shares, strict=True)
    together = [torch.cat(part, -1) for part in (queries, keys, values, logits)]
    for ours, theirs in zip(together, (*whole[:3], whole[4]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    # FP8 has a scale for each row of a share, and a share of the output projection has half of the row.
    rtol, atol = (0.05, 0.05 * whole[3].std().item()) if format_name == "fp8" else (1e-4, 1e-4)
    torch.testing.assert_close(sum(projected), whole[3], rtol=rtol, atol=atol)


@pytest.mark.parametrize("format_name", ["fp8", "mxfp8", "mxfp4"])
def test_a_gpu_gets_the_kernels_bytes_and_calls(one_process, configure, formats, checkpoint, on_a_gpu, format_name):
    formats(format_name, format_name)
    model = load_model(configure(DENSE, dtype="bfloat16"), checkpoint)
    loaded = [model.get_submodule(name).weight.data.clone() for name in DENSE_LAYERS]
    for layer, matrix in zip(process(model), loaded, strict=True):
        packed = Weight.pack(matrix, Format[format_name.upper()])
        assert torch.equal(layer.weight, packed.data)
        assert (packed.row_scales is None) is not hasattr(layer, "row_scales")
        x, bias = torch.randn(2, 3, matrix.shape[1]).bfloat16(), torch.randn(len(matrix)).bfloat16()
        assert torch.equal(layer.quant_method.apply(layer, x, bias), torch.full((2, 3, len(matrix)), 2.0).bfloat16())
        seen, weight, seen_bias = on_a_gpu.pop()
        assert torch.equal(seen, x.flatten(0, 1))
        assert seen_bias is bias
        assert (weight.rows, weight.columns, weight.format) == (packed.rows, packed.columns, packed.format)
        if packed.row_scales is not None:
            assert torch.equal(weight.row_scales, packed.row_scales)


def test_many_tokens_are_expanded_except_in_the_lm_head(one_process, configure, formats, checkpoint, on_a_gpu):
    formats("mxfp4", "mxfp4")
    model = load_model(configure(DENSE, dtype="bfloat16"), checkpoint)
    qkv, *_ = process(model)
    x = torch.ones(150, 64).bfloat16()
    assert torch.equal(qkv.quant_method.apply(qkv, x), torch.full((150, 384), 192.0).bfloat16())
    assert not on_a_gpu
    assert torch.equal(model.compute_logits(x), torch.full((150, VOCABULARY), 2.0).bfloat16())
    assert [len(call[0]) for call in on_a_gpu] == [64, 64, 22]


TWO_HEADS = [("", "fp8", {"quantization_config": {"lm_head": "mxfp8"}}, "the LM head cannot be quantised twice")]
if "lm_head" not in {field.name for field in dataclasses.fields(QuantizationConfigArgs)}:
    TWO_HEADS = []  # upstream's vLLM has no such option: patch 0013 adds it


@pytest.mark.parametrize(
    ("linear", "head", "options", "message"),
    [
        ("fp16", "", {}, "SPARK_MXFP4_LINEAR is 'fp16' · it must be one of bf16, fp8, mxfp8, mxfp4"),
        ("", "int4", {}, "SPARK_MXFP4_LM_HEAD is 'int4'"),
        ("fp8", "", {"quantization_config": {"linear": "mxfp8"}}, "linear layers cannot be quantised twice"),
        *TWO_HEADS,
    ],
)
def test_impossible_formats_are_refused(configure, formats, linear, head, options, message):
    formats(linear, head)
    with pytest.raises(ValueError, match=message):
        configure(DENSE, dtype="bfloat16", **options)


def test_values_and_shares_that_a_format_cannot_hold_are_refused_by_the_layers_name(
    one_process, configure, formats, checkpoint, on_a_gpu
):
    with set_current_vllm_config(configure(DENSE)):
        method = vllm_linear.linear_method("mxfp8", "model.layers.0.attn.o_proj")
    with pytest.raises(ValueError, match=r"attn\.o_proj cannot be served in MXFP8 · .* 48 columns, .*multiple of 32"):
        method.create_weights(torch.nn.Module(), 48, [64], 96, 64, torch.float32, weight_loader=None)
    formats("mxfp4", "")
    model = load_model(configure(DENSE, dtype="bfloat16"), checkpoint)
    layer = model.get_submodule(DENSE_LAYERS[1])
    layer.weight.data[0, 0] = 1e30
    with pytest.raises(ValueError, match=r"attn\.o_proj cannot be served in MXFP4 · .*unset SPARK_MXFP4_LINEAR"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("amx", [True, False])
def test_the_experts_can_be_vllms(configure, formats, monkeypatch, claim_amx, amx):
    formats("fp8", "")
    monkeypatch.setenv("SPARK_MXFP4_KERNEL", "vllm")
    claim_amx(amx)
    if amx:
        assert configure(DENSE, dtype="bfloat16").quant_config.kernel_name == "vllm"
    else:
        with pytest.raises(ValueError, match="no MXFP4 experts on a CPU without AMX"):
            configure(DENSE)


@pytest.mark.parametrize("kernel", ["vllm", "torch"])
def test_the_validator_sees_whose_experts_run(configure, formats, monkeypatch, claim_amx, kernel):
    """The validator's child reads the server's configuration, because the check requires vLLM's own MXFP4 method."""
    formats("fp8", "")
    monkeypatch.setenv("SPARK_MXFP4_KERNEL", kernel)
    claim_amx(True)
    questions = deep_child.Questions(None, [])
    questions.config = configure(DENSE, dtype="bfloat16")
    assert questions.quantization() == {"vllm": "gpt_oss_mxfp4", "torch": "spark-mxfp4"}[kernel]
    assert (questions.quantization() in families.load()[families.default()].experts.methods) is (kernel == "vllm")


def test_the_example_of_the_readme_makes_our_configuration():
    readme = (ROOT / "spark_mxfp4" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from vllm\.model_executor.*?)```", readme, re.DOTALL)
    names = {}
    exec(example, names)  # noqa: S102 - our own README
    assert names["config"].__name__ == "SparkMxfp4Config"
