"""Recipes: each fits its workload and is listed with its evidence; a wrong name is refused with a similar one."""

import json
from dataclasses import replace

import pytest
from programs import write_files

from sparkforge import pins
from sparkforge.cli import program
from sparkforge.core.errors import InputError, RefusalError, UsageError
from sparkforge.models import hub, local, recipes
from sparkforge.models.hub_source import Mirror
from sparkforge.plan import devices, families, planner
from sparkforge.plan.planner import PlanRequest
from sparkforge.serve import profiles

KNOWN = recipes.load()
GIB = 1 << 30


@pytest.mark.parametrize("name", KNOWN)
def test_a_recipe_fits_its_device_by_its_profile_on_each_of_its_stacks(name):
    recipe = KNOWN[name]
    assert recipe.source
    assert recipe.revision_source or not recipe.repository
    assert set(recipe.stacks) <= set(pins.load().stacks)
    for stack in set(recipe.stacks) - {"embedded"}:
        rows = profiles.load_options(stack=stack, family=recipe.family)
        request = PlanRequest(name, recipe.plan.device, str(recipe.plan.context), str(recipe.plan.concurrency))
        subject, device = planner.read_subject(name, KNOWN), devices.named(recipe.plan.device)
        load = planner.read_load(request, subject.model, device, rows)
        plan = planner.make_plan(subject, device, load, rows, request)
        if recipe.plan.machines > 1:
            both = planner.make_plan(subject, device, load, rows, replace(request, nodes=str(recipe.plan.machines)))
            assert [row.way for row in both.cluster.ways if row.fits] == ["tensor", "expert", "pipeline"]
        else:
            assert recipe.profile in [row.name for row in plan.profiles if not row.against]


def test_what_does_not_fit_a_machine_or_a_stack_is_refused_with_the_largest_that_does():
    machine = devices.describe("", 8 * GIB, 7 * GIB, None)
    profiles.require_fit("qwen3-0.6b", KNOWN["qwen3-0.6b"], "embedded", machine, "embedded")
    with pytest.raises(RefusalError, match="GiB are missing", check=lambda e: "qwen3-0.6b" in e.fix):
        profiles.require_fit("gpt-oss-120b", KNOWN["gpt-oss-120b"], "embedded", machine, "embedded")
    with pytest.raises(UsageError, match="not for the stack embedded", check=lambda e: "qwen3-0.6b" in e.fix):
        profiles.require_recipe("qwen3-30b-a3b-fp8", KNOWN["qwen3-30b-a3b-fp8"], "embedded", "embedded")


def test_up_takes_a_recipe_and_refuses_it_beside_a_model(capsys):
    assert program.main(["up", "qwen3-0.6b", "--model", "/x", "--device", "embedded"]) == UsageError.exit_code
    assert "both name a model" in capsys.readouterr().err
    assert program.main(["up", "qwen4", "--device", "embedded"]) == InputError.exit_code
    assert "./inv models" in capsys.readouterr().err


def test_models_lists_every_family_and_recipe(capsys):
    assert program.main(["models"]) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    evidence = [f"{name}: {recipe.shown[0].what} (" for name, recipe in KNOWN.items() if recipe.shown]
    for text in (*families.load(), *KNOWN, *evidence, "vLLM's selector returns TRITON"):
        assert text in printed
    assert program.main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (set(listed["families"]), set(listed["recipes"])) == (set(families.load()), set(KNOWN))


def test_a_recipe_is_fetched_by_its_repository_and_planned_by_both_names(capsys):
    assert program.main(["pull", "qwen3-0.6b", "--mirror", "/nowhere"]) != 0
    assert "Qwen/Qwen3-0.6B" in capsys.readouterr().err
    assert planner.read_subject("Qwen/Qwen3-0.6B", KNOWN) == planner.read_subject("qwen3-0.6b", KNOWN)


@pytest.mark.parametrize("word", ["/root/x y", "./x", "~/x", "a/b/c", "a b/c", "openai/", "tiny-gpt-oss"])
def test_only_a_repository_can_be_pulled_and_a_folder_is_served_as_it_is(word, capsys):
    assert program.main(["pull", word]) == 2
    error = capsys.readouterr().err
    assert f"{word!r} is not a repository" in error
    assert ("next: ./inv up --model " in error) == word.startswith((".", "/", "~"))


CONFIG = KNOWN["qwen3-0.6b"].config
GOOD = recipes.weights(KNOWN["qwen3-0.6b"]).weight_bytes()


@pytest.mark.parametrize(
    ("config", "total", "message"),
    [
        ({**CONFIG, "model_type": "glm4_moe"}, GOOD, "unknown architecture"),
        ({**CONFIG, "quantization_config": {"quant_method": "fp8", "config_groups": {"a": 1, "b": 2}}}, GOOD, "format"),
        ({**CONFIG, "num_hidden_layers": 40}, GOOD, "by config.json"),
    ],
)
def test_a_wrong_model_is_refused_before_its_weights_are_fetched(tmp_path, config, total, message):
    index = {"metadata": {"total_size": total}, "weight_map": {"a": "model.safetensors"}}
    files = {"config.json": json.dumps(config), "model.safetensors.index.json": json.dumps(index)}
    source = write_files(tmp_path / "source", files)
    (source / "model.safetensors").write_bytes(b"weights")
    target = tmp_path / "target"
    with pytest.raises(InputError, check=lambda e: message in f"{e.what} {e.why}" and "nearest recipe" in e.fix):
        hub.fetch_checkpoint(Mirror(source, "somebody/model", ""), target)
    assert not [
        file for file in tmp_path.rglob("*model.safetensors*") if "source" not in str(file) and "index" not in str(file)
    ]


def test_a_folder_of_no_family_is_refused_with_the_nearest_recipe(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe"}))
    with pytest.raises(InputError, match="cannot be served", check=lambda e: "nearest recipe" in e.fix):
        local.family_of(tmp_path)
