"""Patches 0001 and 0002: the choices of vLLM's own code in a stock and a patched tree for made-up devices."""

import json
from pathlib import Path

import pytest

from lab.upstream import experts
from sparkforge.models import recipes
from sparkforge.plan import families

pytestmark = pytest.mark.integration
FP4 = "FLASHINFER_CUTLASS_MXFP4_MXFP8"
SPARK = (12, 1)
NATIVE = {"selector": "select_deepseek_v4_mxfp4_moe_backend"}  # for MXFP4 experts in an FP8 checkpoint
# name: compute capability, whether FlashInfer is installed, differences from gpt-oss's layer, further fields
CASES = {
    "cpu": (None, True, {}, {}),
    "spark": (SPARK, True, {}, {}),
    "rtx": ((12, 0), True, {}, {}),
    "spark named": (SPARK, True, {"moe_backend": "flashinfer_cutlass"}, {}),
    "spark marlin": (SPARK, True, {"moe_backend": "marlin"}, {}),
    "spark lora": (SPARK, True, {"is_lora_enabled": True}, {}),
    "spark without flashinfer": (SPARK, False, {}, {}),
    "spark without bias": (SPARK, True, {"has_bias": False}, {}),
    "native": (SPARK, True, {"has_bias": False}, NATIVE),
    "native rtx": ((12, 0), True, {"has_bias": False}, NATIVE),
    "native marlin": (SPARK, True, {"has_bias": False, "moe_backend": "marlin"}, NATIVE),
    "native without flashinfer": (SPARK, False, {"has_bias": False}, NATIVE),
    "native hopper": ((9, 0), True, {"has_bias": False}, NATIVE),
    "native b200": ((10, 0), True, {"has_bias": False}, NATIVE),
    "hopper": ((9, 0), True, {}, {}),
    "b200": ((10, 0), True, {}, {}),
    "thor": ((11, 0), True, {}, {}),
}
NVFP4 = {"oracle": "nvfp4", "selector": "select_nvfp4_moe_backend", "keys": ["kNvfp4Static", "kNvfp4Dynamic"]}
# recipe: the format of its experts, and the backends of a stock and a patched vLLM on 12.1. For FP8 the CPU build has
# no answer, because its platform does not support FP8, and its Triton no CPU.
RECIPES = {
    "ling-3.0-flash-fp4": (NATIVE, "MARLIN", FP4),
    "deepseek-v4-flash": (NATIVE, "MARLIN", FP4),
    "glm-4.7-flash-nvfp4": (NVFP4, "FLASHINFER_CUTLASS", "FLASHINFER_CUTLASS"),
}
CHANGED = {"spark", "rtx", "spark named", "native", "native rtx"}
WARNED = {
    "spark lora": "kernel does not support LoRA",
    "spark without flashinfer": "FlashInfer's CUTLASS fused MoE is not installed",
}
BLACKWELL = {(8, 0): False, (9, 0): False, (10, 0): True, (10, 3): True, (11, 0): True, (12, 0): True, (12, 1): True}


@pytest.fixture(scope="module", params=["vllm_trees", pytest.param("next_trees", marks=pytest.mark.nightly)])
def trees(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def ask(trees, vllm_process):
    def ask(tree, program, question):
        return json.loads(vllm_process(vars(trees)[tree]).run(program, (), json.dumps(question)).splitlines()[-1])

    return ask


def test_12x_gets_hardware_fp4_and_all_other_choices_are_unchanged(ask):
    cases = [{"capability": c, "flashinfer": f, "config": config, **more} for c, f, config, more in CASES.values()]
    before, after = (
        dict(zip(CASES, ask(tree, experts.PROGRAM, {"cases": cases})["selections"], strict=True))
        for tree in ("upstream", "patched")
    )
    assert {name for name in CASES if before[name]["backend"] == FP4} == set()
    assert {before[name]["backend"] for name in ("spark", "rtx", "native", "native rtx")} == {"MARLIN"}
    assert {name for name in CASES if after[name]["backend"] == FP4} == CHANGED
    for name in CASES.keys() - CHANGED:
        assert [after[name][key] for key in ("backend", "error")] == [before[name][key] for key in ("backend", "error")]
    for name, reason in WARNED.items():
        assert any(reason in warning for warning in after[name]["warnings"]), name


def test_the_experts_of_each_recipe_get_the_backend_that_is_expected_of_them(ask):
    cases = []
    for name, (more, *_) in RECIPES.items():
        recipe = recipes.load()[name]
        row, model = families.load()[recipe.family].experts, recipes.weights(recipe)
        counts = dict.fromkeys(("num_experts", "num_local_experts", "num_logical_experts"), model.experts)
        config = {**counts, "experts_per_token": model.top_k, "hidden_dim": model.hidden, "has_bias": row.bias}
        config |= {"intermediate_size": model.intermediate, "activation": row.activation}
        cases.append({"capability": SPARK, "flashinfer": True, "config": config, "routing": row.routing, **more})
    taken = [
        [answer["backend"] or answer["error"] for answer in ask(tree, experts.PROGRAM, {"cases": cases})["selections"]]
        for tree in ("upstream", "patched")
    ]
    assert list(map(tuple, zip(*taken, strict=True))) == [tuple(expected) for _, *expected in RECIPES.values()]


def test_blackwell_class_is_the_generation_and_no_family(ask):
    program = Path(__file__).with_name("blackwell_class.py")
    devices = [*(("CUDA", capability) for capability in BLACKWELL), ("CUDA", None), ("ROCM", (12, 0)), ("CPU", (10, 0))]
    assert ask("upstream", program, devices) == [None] * len(devices)
    answers = ask("patched", program, devices)
    assert [answer[0] for answer in answers] == [*BLACKWELL.values(), False, False, False]
    assert [answer[1] for answer in answers[:7]] == [capability[0] == 10 for capability in BLACKWELL]
