"""Patches 0001 and 0002: the choices of vLLM's own code in a stock and a patched tree for made-up devices."""

import json

import pytest

from lab.upstream import experts
from sparkforge.models import recipes
from sparkforge.plan import families
from sparkforge.serve import profiles

pytestmark = pytest.mark.integration
FP4 = "FLASHINFER_CUTLASS_MXFP4_MXFP8"
SPARK = (12, 1)
NATIVE = {"selector": ["mxfp4", "select_deepseek_v4_mxfp4_moe_backend"]}  # for MXFP4 experts in an FP8 checkpoint
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
# recipe: the backends of a stock vLLM on 12.1, and where DeepGEMM is installed too, as in upstream's wheels
RECIPES = {
    "ling-3.0-flash-fp4": ("MARLIN", "DEEPGEMM_MXFP4"),
    "deepseek-v4-flash": ("MARLIN", "DEEPGEMM_MXFP4"),
    "glm-4.7-flash-nvfp4": ("FLASHINFER_CUTLASS", "FLASHINFER_CUTLASS"),
    "qwen3-30b-a3b-fp8": ("TRITON", "DEEPGEMM"),
    "qwen3.6-35b-a3b-fp8": ("TRITON", "DEEPGEMM"),
}
CHANGED = {"spark", "rtx", "spark named", "native", "native rtx"}
WARNED = {
    "spark lora": "kernel does not support LoRA",
    "spark without flashinfer": "FlashInfer's CUTLASS fused MoE is not installed",
}


@pytest.fixture(scope="module")
def ask(release, vllm_process):
    def ask(tree, program, question, **variables):
        process = vllm_process(vars(release)[tree])
        return json.loads(process.run(program, (), json.dumps(question), **variables).splitlines()[-1])

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


def test_the_experts_of_each_recipe_get_the_backend_that_its_familys_row_expects(ask, release):
    cases = []
    for name in RECIPES:
        recipe = recipes.load()[name]
        row, model = families.load()[recipe.family].experts, recipes.weights(recipe)
        assert model.experts_form == row.selector[0]
        counts = dict.fromkeys(("num_experts", "num_local_experts", "num_logical_experts"), model.experts)
        config = {**counts, "experts_per_token": model.top_k, "hidden_dim": model.hidden, "has_bias": row.bias}
        config |= {"intermediate_size": model.intermediate, "activation": row.activation}
        more = {"flashinfer": True, "routing": row.routing, "selector": row.selector}
        more["model_type"] = "qwen3_5_moe_text" if "text_config" in recipe.config else recipe.config["model_type"]
        cases.append({"capability": SPARK, "config": config, **more})

    def selected(tree, cases, **variables):
        answers = ask(tree, experts.PROGRAM, {"cases": cases}, **variables)["selections"]
        return dict(zip(RECIPES, [answer["backend"] or answer["error"] for answer in answers], strict=True))

    stack = release.stack
    rows = {name: families.load()[recipes.load()[name].family].experts.backends["12.1"][stack] for name in RECIPES}
    beside = [{**case, "deep_gemm": True} for case in cases]
    taken = {name: backend for name, (_, backend) in RECIPES.items()}
    if stack == "spark-next":  # it excludes DeepGEMM for this model (vLLM issue 50332)
        taken["qwen3.6-35b-a3b-fp8"] = "TRITON"
    assert selected("upstream", cases) == {name: backend for name, (backend, _) in RECIPES.items()}
    assert selected("patched", cases) == rows
    assert selected("patched", beside) == taken
    assert selected("patched", beside, **profiles.named("safe", stack=stack).variables()) == rows
