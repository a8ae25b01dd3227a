"""The validator's deep facts from the real vLLM, on this CPU and with a platform plugin that claims to be a 12.1.

The plugin keeps the CPU build's platform until vLLM has built its configuration (the CPU build cannot be imported as
CUDA), then answers "CUDA, 12.1"; a fake FlashInfer has the names that vLLM looks for. Parser, configuration and
selector are vLLM's own.
"""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

import pytest

from sparkforge.core.files import write_atomic, write_json
from sparkforge.models import recipes
from sparkforge.models.harmony import tokenizer_files
from sparkforge.models.tiny import Sizes, config
from sparkforge.plan import families
from validate import Options, ValidationVerdict, rehearse
from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts import checkpoint
from validate.facts.child import DEEP, LAYERS, NUMERICS, Outcome, entries
from validate.facts.child import gather as gather_facts
from validate.facts.fact import Fact
from validate.facts.target import Target

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FP4 = "FLASHINFER_CUTLASS_MXFP4_MXFP8"
WHY = families.load()[families.default()].experts.why
TOKENLESS = ("--skip-tokenizer-init", "--max-model-len", "512")
FLAGS = ("--moe-backend", "flashinfer_cutlass", "--quantization-config.moe.activation", "mxfp8")
# The names that vllm/utils/flashinfer.py needs in has_flashinfer_cutlass_fused_moe.
FLASHINFER = {
    "__init__": ("fp4_quantize", "nvfp4_block_scale_interleave"),
    "fused_moe": ("cutlass_fused_moe", "trtllm_fp4_block_scale_moe"),
    "cute_dsl": (),  # has_flashinfer_cutedsl asks whether it is there
}
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability, PlatformEnum

class ClaimedGB10(CpuPlatform):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(12, 1)

    @classmethod
    def check_and_update_config(cls, vllm_config):
        super().check_and_update_config(vllm_config)
        cls._enum = PlatformEnum.CUDA
        cls.device_name = cls.device_type = "cuda"
        # The answers of a CUDA build's compiled functions for 12.1 (csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu).
        # vLLM stores the second when it is imported.
        from vllm import _custom_ops
        from vllm.model_executor.kernels.linear.scaled_mm import cutlass
        _custom_ops.cutlass_scaled_mm_supports_fp8 = lambda capability: capability >= 89
        cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = True

    @classmethod
    def support_deep_gemm(cls):
        return True  # as in vllm/platforms/cuda.py for the family 120

    @classmethod
    def supports_fp8(cls):
        return True  # as in vllm/platforms/cuda.py from 8.9
"""


@pytest.fixture(scope="module")
def gb10_facts(gb10_sheet):
    """Return a function: a stack → the facts of a Spark's recorded sheet."""
    return lambda stack: {name: Fact(**entry) for name, entry in json.loads(gb10_sheet(stack))["facts"].items()}


@pytest.fixture(scope="module")
def claim(tmp_path_factory):
    directory = tmp_path_factory.mktemp("claim")
    info = directory / "claimed_gb10-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: claimed-gb10\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nclaimed_gb10 = claimed_gb10:register\n")
    (directory / "claimed_gb10.py").write_text("def register(): return 'claimed_gb10_platform.ClaimedGB10'\n")
    (directory / "claimed_gb10_platform.py").write_text(PLATFORM)
    (directory / "flashinfer").mkdir()
    for module, names in FLASHINFER.items():
        (directory / "flashinfer" / f"{module}.py").write_text("".join(f"def {name}(): ...\n" for name in names))
    return directory


def environment(*path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    ours = {"PYTHONPATH": ":".join(map(str, (*path, ROOT))), "OMP_NUM_THREADS": "1", "VLLM_HAS_FLASHINFER_CUBIN": "1"}
    # vLLM caches one answer about the model's class, by the hash of its file; trees with different files would replace
    # it.
    (model,) = (tree / "vllm/model_executor/models/gpt_oss.py" for tree in path if (tree / "vllm").is_dir())
    cache = Path(os.environ["VLLM_CACHE_ROOT"], hashlib.sha256(model.read_bytes()).hexdigest()[:8])
    return {**kept, **ours, "VLLM_CACHE_ROOT": str(cache)}


def target(model, *path, args=()):
    options = Options(model=model, serve_args=("--dtype", "bfloat16", *args), environ=environment(*path))
    return Target(options, "spark")


# Modules that the validator's programs import before they have a configuration.
IMPORTS = ["vllm.engine.arg_utils", "vllm.utils.argparse_utils", "vllm.platforms", "sparkforge.serve.forked_vllm"]


@pytest.fixture(scope="module")
def gather_in_forks(forks):
    """Return a function: DEEP or NUMERICS, a target, its path → the facts. The validator's program runs in a fork.

    For each path there is one process that has imported vLLM, because the import takes most of the program's time.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def process(path):
            return stack.enter_context(forks(IMPORTS, environment(*path)))

        def gather(facts, target, path):
            def run_in_a_fork(target, programs):
                (program,) = programs
                request = {"model": checkpoint.path(target), "serve_args": list(target.options.serve_args)}
                request |= {"layer": checkpoint.layer(target), **program.request}
                with tempfile.TemporaryDirectory() as folder:
                    process(path).run(program.file, (json.dumps(request), Path(folder) / "facts"))
                    return [Outcome({entry["name"]: entry for entry in entries(Path(folder) / "facts")})]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("validate.facts.child.run_programs", run_in_a_fork)
                return gather_facts(target, facts)[0]

        yield gather


@pytest.fixture(scope="module")
def deep_facts(gather_in_forks):
    """Return a function: model, path, arguments → deep facts, each gathered once."""

    @functools.cache
    def deep_facts(model, *path, args=()):
        return gather_in_forks(DEEP, target(model, *path, args=args), path)

    return deep_facts


def test_on_a_cpu_the_facts_are_those_of_a_cpu(random_model, vllm_trees):
    # Set explicitly, because by default the plugin claims the checkpoint only on a CPU without AMX.
    facts, _ = gather_facts(target(random_model, vllm_trees.upstream, args=("--quantization", "spark-mxfp4")), DEEP)
    assert facts["deep.platform"].value == "CpuPlatform"
    assert facts["deep.quantization"].value == "spark-mxfp4"
    assert facts["deep.attention_backend"].value == ["CPU_ATTN"]
    assert "the patch is not applied" in facts["deep.is_blackwell_class"].error


@pytest.mark.parametrize(
    ("tree", "args", "backend"),
    [
        ("upstream", (), "MARLIN"),
        ("upstream", FLAGS, FP4),
        ("patched", (), FP4),
        ("patched", ("--quantization", "mxfp4"), FP4),  # as people type it
        ("patched", ("--moe-backend", "marlin"), "MARLIN"),
    ],
)
def test_moe_backend_on_a_claimed_gb10(deep_facts, random_model, release, claim, tree, args, backend):
    facts = deep_facts(random_model, vars(release)[tree], claim, args=args)
    assert facts["deep.capability"].value == "12.1"
    assert facts["deep.moe_backend"].error is None
    assert facts["deep.moe_backend"].value == backend
    # Before the configuration exists the plugin is still the CPU platform, whose method returns False.
    assert facts["deep.is_blackwell_class"].value is (False if tree == "patched" else None)


@pytest.mark.parametrize("recipe", ["qwen3-30b-a3b-fp8", "glm-4.7-flash-nvfp4"])
def test_the_backend_of_another_familys_experts_is_the_one_of_its_row(
    deep_facts, tmp_path, release, claim, gb10_facts, recipe
):
    config = dict(recipes.load()[recipe].config)
    if "weight_block_size" in (quantization := config["quantization_config"]):
        config["quantization_config"] = {**quantization, "activation_scheme": "dynamic"}
    write_json(tmp_path / "config.json", config)
    answers = deep_facts(tmp_path, release.patched, claim, args=TOKENLESS)
    chosen = {name: answers[name] for name in ("deep.moe_backend", "deep.quantization", "deep.capability")}
    sheet = gb10_facts(release.stack)
    finding = evaluate(CHECKS["moe-backend"], View({**sheet, **chosen, "model.config": Fact(config, "test")}))
    (backend,) = {families.load()[recipes.load()[recipe].family].experts.backends["12.1"][release.stack]}
    assert (finding.status, finding.evidence) == (Status.PASS, f"vLLM selects {backend}")


@pytest.mark.parametrize("more", [(), FLAGS], ids=["its profile", "beside safe"])
def test_our_plugin_may_serve_on_a_claimed_gb10(
    deep_facts, gather_in_forks, random_model, release, claim, gb10_facts, more
):
    """A Spark's sheet with the answers of this vLLM, and a layer computed by our plugin's kernel in this run."""
    args, tree = ("--quantization", "spark-mxfp4", *more), release.patched
    answers = deep_facts(random_model, tree, claim, args=args)
    assert answers["deep.capability"].value == "12.1"
    assert answers["deep.quantization"].value == "spark-mxfp4", answers["deep.quantization"].error
    computed = gather_in_forks(NUMERICS, target(random_model, tree, claim, args=args), (tree, claim))
    assert computed["numerics.kernel"].value == "spark_mxfp4 torch"  # this torch has no CUDA
    chosen = {name: answers[name] for name in ("deep.moe_backend", "deep.quantization", "deep.capability")}
    sheet = gb10_facts(release.stack)
    sheet["layers.differences"] = Fact({"experts 0": 0.004}, "test")  # in bfloat16, as our kernel's
    report = rehearse("spark", {**sheet, **chosen, **computed}, "test")
    assert report.verdict is ValidationVerdict.SERVE, report.of(Status.FAIL)
    assert [finding.check for finding in report.of(Status.WARN)] == ["moe-backend"]
    wrong = {**computed, "numerics.difference": Fact(0.4, "test")}
    assert rehearse("spark", {**sheet, **chosen, **wrong}, "test").verdict is ValidationVerdict.REFUSE


def test_each_part_of_two_layers_is_right_by_the_cpus_backends(gather_in_forks, random_model, vllm_trees):
    path = (vllm_trees.patched,)
    facts = gather_in_forks(LAYERS, target(random_model, *path, args=("--quantization", "spark-mxfp4")), path)
    assert set(facts["layers.differences"].value) == {
        *(f"{part} {layer}" for part in ("qkv_proj", "o_proj", "router", "experts") for layer in (0, 1)),
        *(f"attention {kind} {step}" for kind in ("sliding", "full") for step in ("prefill", "decode")),
        "lm_head",
    }
    tolerance = {"numerics.tolerance": Fact(0.02, "test")}
    finding = evaluate(CHECKS["layers"], View({**facts, **tolerance}))
    assert finding.status is Status.PASS, finding.evidence


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    sizes = Sizes(hidden=2880, intermediate=2880, layers=36, experts=128, top_k=4, heads=64, kv_heads=8)
    write_json(folder / "config.json", config(sizes))
    for name, data in tokenizer_files().items():
        write_atomic(folder / name, data)
    return folder


LINEAR, HEAD = "--quantization-config.linear", "--quantization-config.lm_head"
FP8, MXFP8, MARLIN = "CutlassFP8ScaledMMLinearKernel", "FlashInferCutlassMxfp8LinearKernel", "MarlinMxFp4LinearKernel"
TWO = ("--tensor-parallel-size", "2")  # of the LM head's 201,088 rows, each device has 100,544


@pytest.mark.parametrize(
    ("tree", "args", "linear", "head"),
    [
        ("upstream", (), "bf16", "bf16"),
        ("upstream", (LINEAR, "fp8_per_channel"), FP8, "bf16"),
        ("upstream", (LINEAR, "fp8_per_block"), "CutlassFp8BlockScaledMMKernel", "bf16"),
        ("upstream", (LINEAR, "mxfp8"), MXFP8, "bf16"),
        ("upstream", (LINEAR, "mxfp4"), "FlashInferMxFp4LinearKernel", "bf16"),
        ("upstream", (LINEAR, "mxfp4", "--linear-backend", "marlin"), MARLIN, "bf16"),
        ("patched", (HEAD, "fp8_per_channel"), "bf16", FP8),  # patch 0013
        ("patched", (HEAD, "mxfp8"), "bf16", MXFP8),
        ("patched", (HEAD, "mxfp8", *TWO), "bf16", MXFP8),
        ("patched", (HEAD, "mxfp4", "--linear-backend", "marlin", *TWO), "bf16", MARLIN),
    ],
)
def test_dense_kernels_on_a_claimed_gb10(deep_facts, large, release, claim, tree, args, linear, head):
    facts = deep_facts(large, vars(release)[tree], claim, args=args)
    assert facts["deep.dense_kernels"].error is None
    assert facts["deep.dense_kernels"].value == {"qkv_proj": linear, "o_proj": linear, "lm_head": head}


@pytest.mark.parametrize(
    ("tree", "verdict", "evidence"),
    [
        pytest.param("upstream", ValidationVerdict.REFUSE,
                     f"vLLM will run the experts with MARLIN instead of {FP4}: {WHY}", marks=pytest.mark.nightly),
        ("patched", ValidationVerdict.SERVE, f"vLLM selects {FP4}"),
    ],
)  # fmt: skip
def test_a_gb10_sheet_is_judged_by_the_newest_vllms_own_selector(
    deep_facts, random_model, next_trees, claim, gb10_facts, tree, verdict, evidence
):
    """The sheet of spark-next has this vLLM's answers in place of the recorded ones."""
    answers = deep_facts(random_model, vars(next_trees)[tree], claim)
    chosen = {name: answers[name] for name in ("deep.moe_backend", "deep.capability")}
    sheet = gb10_facts("spark-next")
    report = rehearse("spark", {**sheet, **chosen}, "test")
    assert report.verdict is verdict
    (finding,) = (finding for finding in report.findings if finding.check == "moe-backend")
    assert finding.evidence == evidence
    assert [f.check for f in report.findings if f.status is Status.FAIL] == ["moe-backend"] * (tree == "upstream")


# The FlashInfer functions that vLLM's MXFP8 x MXFP4 experts call, in plain torch. Scales stay in rows, because their
# swizzle is internal to the kernel. The tests cover selection, weights, scales, biases and quantized input.
COMPUTING = {
    "__init__.py": """
import torch
torch.accelerator.empty_cache = lambda: None  # vLLM empties the cache of a device that this torch does not have
def fp4_quantize(): ...
def nvfp4_block_scale_interleave(): ...
def block_scale_interleave(scales): return scales
def mxfp8_quantize(x, **_):
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 8)
    return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)
""",
    "fused_moe/core.py": """
class ActivationType:
    Swiglu = Geglu = GegluTanh = Relu2 = Silu = Gelu = Identity = 3
""",
    "fused_moe/__init__.py": """
import torch
E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])
def trtllm_fp4_block_scale_moe(): ...
def unpack(blocks, scales):
    blocks, scales = blocks.view(torch.uint8).long(), scales.view(torch.uint8).float()
    values = torch.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], -1).flatten(-2)
    return values * torch.exp2(scales - 127).repeat_interleave(32, -1)
def cutlass_fused_moe(*, input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights,
                      fc1_expert_biases, fc2_expert_biases, swiglu_alpha, swiglu_beta, swiglu_limit, output,
                      quant_scales, input_sf, use_mxfp8_act_scaling, **_):
    assert use_mxfp8_act_scaling and input.dtype == torch.float8_e4m3fn
    x = (input.float().unflatten(-1, (-1, 32)) * input_sf.view(len(input), -1, 1)).flatten(-2)
    first, second = unpack(fc1_expert_weights, quant_scales[0]), unpack(fc2_expert_weights, quant_scales[2])
    output.zero_()
    for token, (experts, weights) in enumerate(zip(token_selected_experts.tolist(), token_final_scales.tolist())):
        for expert, weight in zip(experts, weights):
            up, gate = (first[expert] @ x[token] + fc1_expert_biases[expert].float()).chunk(2)  # up rows come first
            limit = swiglu_limit[expert]
            gate, up = gate.clamp(max=limit), torch.minimum(torch.maximum(up, -limit), limit)
            hidden = (up + swiglu_beta[expert]) * gate * torch.sigmoid(swiglu_alpha[expert] * gate)
            output[token] += (weight * (second[expert] @ hidden + fc2_expert_biases[expert].float())).to(output.dtype)
""",
}


@pytest.fixture(scope="module")
def computed(gather_in_forks, random_model, vllm_trees, claim, tmp_path_factory):
    """Return a function: changes of a FlashInfer that computes on the CPU → the facts of numerics."""
    folder = tmp_path_factory.mktemp("computing")

    def computed(change=lambda text: text):
        for name, text in COMPUTING.items():
            path = folder / "flashinfer" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(change(text))
            for compiled in path.parent.glob("__pycache__/*"):
                compiled.unlink()  # the next text may have the same size and second
        path = (folder, vllm_trees.patched, claim)
        return gather_in_forks(NUMERICS, target(random_model, *path), path)

    return computed


def test_numerics_go_through_vllms_own_experts_and_notice_gate_and_up_in_the_wrong_order(computed):
    facts = computed()
    assert (facts["numerics.kernel"].value, facts["numerics.tolerance"].value) == (FP4, 0.1), facts
    assert facts["numerics.difference"].error is None
    assert 0.005 < facts["numerics.difference"].value < 0.06
    assert evaluate(CHECKS["numerics"], View(facts)).status is Status.PASS
    facts = computed(lambda text: text.replace("up, gate = (first", "gate, up = (first"))
    assert facts["numerics.difference"].value > 0.5, facts
    assert evaluate(CHECKS["numerics"], View(facts)).status is Status.FAIL
