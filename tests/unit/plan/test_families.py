"""Families of models as rows: their formulas give published sizes, and bad rows are refused."""

import json

import pytest

from sparkforge.cli import program
from sparkforge.core.errors import InputError
from sparkforge.models import recipes
from sparkforge.plan import families
from sparkforge.plan.architecture import parse
from sparkforge.serve import profiles

KNOWN = {name: recipe.config for name, recipe in recipes.load().items()}
LING = KNOWN["ling-3.0-flash-fp4"]
QWEN3 = {**KNOWN["qwen3-0.6b"], "hidden_size": 2048, "intermediate_size": 6144}
QWEN3_MOE = {name: value for name, value in KNOWN["qwen3-30b-a3b-fp8"].items() if name != "quantization_config"}


def test_weights_are_those_that_are_published():
    for config, parameters in (
        (QWEN3_MOE, 30_532_122_624), (QWEN3, 1_720_574_976), (KNOWN["qwen3-0.6b"], 596_049_920),
    ):  # fmt: skip
        assert parse(config, "t").weight_bytes() == 2 * parameters


def test_ling_flash_is_as_large_as_published():
    """It has 127.5 billion weights with the draft layer, 124 without; 70.4 GB on disk, 64.3 loaded (see its recipe)."""
    model = parse(LING, "t")
    count = sum(part.count + part.plain for part in model.parts())
    draft = model.expert * model.experts
    assert 123.5e9 < count < 124.6e9
    assert abs(count + draft - 127.5e9) < 0.3e9
    assert abs(model.weight_bytes() + model.experts * model.expert_bytes - 70.4e9) < 0.2e9
    assert not model.disagreement(70_400_000_000)
    assert "by config.json" in model.disagreement(128_400_000_000)
    assert (model.full_layers, model.linear_layers, model.expert_layers) == (7, 35, 40)


def test_glm_flash_and_qwen36_are_as_large_as_published():
    """GLM has 30 billion weights, 20.4 GB in NVFP4 with the draft layer; Qwen3.6 35 billion, sizes in text_config."""
    glm, qwen = (parse(KNOWN[name], name) for name in ("glm-4.7-flash-nvfp4", "qwen3.6-35b-a3b-fp8"))
    assert 29.9e9 < sum(part.count for part in glm.parts()) < 30e9
    assert not glm.disagreement(20_400_000_000)
    assert "by config.json" in glm.disagreement(62_400_000_000)
    assert sum(part.count + part.plain for part in qwen.parts()) == 34_660_610_688
    assert (qwen.full_layers, qwen.linear_layers, glm.latent, qwen.latent) == (10, 30, True, False)


def test_deepseek_v4_flash_takes_two_sparks(capsys):
    model = parse(KNOWN["deepseek-v4-flash"], "t")
    forms = {part.name: part.form for part in model.parts()}
    assert (forms["experts down"], forms["attention"], forms["indexers"]) == ("mxfp4", "fp8", "bf16")
    assert sum(part.count for part in model.parts()) // 10**9 == 284  # billions, from its model card
    assert program.main(["plan", "deepseek-v4-flash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["nodes"] == 2
    assert program.main(["plan", "deepseek-v4-flash", "--device", "h200"]) == 30


def test_a_dense_model_has_no_experts_and_those_of_a_mixed_checkpoint_their_own_form():
    model = parse(QWEN3, "t")
    assert (model.experts, model.expert_bytes, model.padding_bytes(128)) == (0, 0.0, 0)
    forms = {part.name: part.form for part in parse(LING, "t").parts()}
    assert (forms["experts down"], forms["shared experts"], forms["router"]) == ("mxfp4", "fp8", "bf16")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "glm4_moe"}, "unknown architecture"),
        ({"architectures": ["LlamaForCausalLM"]}, "unknown architecture"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "unknown architecture"),
        ({"quantization_config": {"quant_method": "fp8", "routed_experts_quant_method": "nvfp4"}}, "not known"),
        ({"quantization_config": {"quant_method": "fp8", "config_groups": {"a": {}, "b": {}}}}, "not known"),
        ({"quantization_config": {"quant_method": "fp8", "quant_algo": "MIXED_PRECISION"}}, "not known"),
        ({"num_experts": None}, "num_experts makes no sense"),
        ({"mlp_only_layers": [1] * 50}, "makes no sense"),
        ({"moe_intermediate_size": "768"}, "moe_intermediate_size makes no sense"),
    ],
)
def test_models_without_a_row_are_refused(changed, message):
    with pytest.raises(InputError, match=message, check=lambda error: error.code == "input.config" and error.fix):
        parse({**QWEN3_MOE, **changed}, "config.json")


def test_a_profile_has_the_parsers_of_the_family_and_none_of_the_flags_that_it_does_not_take():
    own = dict(flag.partition("=")[::2] for flag in profiles.named("safe", family="ling").arguments())
    default = profiles.named("safe").arguments()
    assert (own["--tool-call-parser"], own["--reasoning-parser"]) == ("ling3", "ling3")
    assert "--moe-backend" not in own
    assert "--quantization-config.moe.activation" not in own
    assert "--tool-call-parser=openai" in default
    assert not [flag for flag in default if flag.startswith("--reasoning-parser")]


def test_a_row_names_serve_profiles_with_our_experts():
    rows = [row.experts for row in families.load().values() if row.experts]
    named = {name for experts in rows for name in experts.ours}
    assert named <= {name for name, row in profiles.load().items() if "--quantization=spark-mxfp4" in row.arguments()}
    assert profiles.named("embedded-kv8", family="qwen3-moe").variables()["SPARK_MXFP4_FAMILIES"] == "on"


def test_a_formula_is_arithmetic_and_nothing_else():
    for formula in ("f(x)", "a.b", "'x'", "1 / 2", "a ** b", "(", "[1]", "lambda: 1"):
        with pytest.raises(ValueError, match="formula"):
            families.evaluate(formula, lambda _name: 1)
    values = {"a": 7, "zero": 0}
    assert families.evaluate("(a + 1) * 2 - a // 2", values.get) == 13
    assert families.evaluate("missing or zero", values.get) == 0
    assert families.evaluate("a if zero else missing or 3", values.get) == 3
    with pytest.raises(KeyError, match="missing"):
        families.evaluate("a * missing", values.get)


def test_a_recipe_of_no_repository_or_without_weights_is_refused(tmp_path):
    text, file = (recipes.FOLDER / "gpt-oss-20b.toml").read_text(), tmp_path / "x.toml"
    for key, value, wrong in (
        ("repository", '"openai/gpt-oss-20b"', '"../x"'), ("tensor_bytes", "13761264768", "-1"),
    ):  # fmt: skip
        assert f"{key} = {value}" in text
        file.write_text(text.replace(f"{key} = {value}", f"{key} = {wrong}"))
        with pytest.raises(InputError, match=key):
            recipes.read(file)
