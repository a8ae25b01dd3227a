"""The patches for vLLM, proven by vLLM's own code, of each stack: each asked in a pristine and in a patched tree."""

import json
from pathlib import Path

import pytest

from lab.upstream import experts

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
FP4 = "FLASHINFER_CUTLASS_MXFP4_MXFP8"
STAYS_OFF = f"stays off the FP4 tensor cores of compute capability 12.x: '{FP4}' cannot be used since "


@pytest.fixture(scope="module", params=["vllm_trees", pytest.param("next_trees", marks=pytest.mark.nightly)])
def trees(request):
    return request.getfixturevalue(request.param)


# name: (compute capability, FlashInfer there?, what differs from gpt-oss's MoE config)
CASES = {
    "cpu": (None, False, {}),
    "cpu with flashinfer": (None, True, {}),
    "spark": ((12, 1), True, {}),
    "rtx": ((12, 0), True, {}),
    "spark named": ((12, 1), True, {"moe_backend": "flashinfer_cutlass"}),
    "spark lora": ((12, 1), True, {"is_lora_enabled": True}),
    "spark lora named": ((12, 1), True, {"is_lora_enabled": True, "moe_backend": "flashinfer_cutlass"}),
    "spark without flashinfer": ((12, 1), False, {}),
    "spark without bias": ((12, 1), True, {"has_bias": False}),
    "spark marlin": ((12, 1), True, {"moe_backend": "marlin"}),
    "spark afp8": ((12, 1), True, {"moe_backend": "flashinfer_cutlass_afp8"}),
    "spark humming": ((12, 1), True, {"moe_backend": "humming"}),
    "hopper": ((9, 0), True, {}),
    "hopper named": ((9, 0), True, {"moe_backend": "flashinfer_cutlass"}),
    "b200": ((10, 0), True, {}),
    "b200 named": ((10, 0), True, {"moe_backend": "flashinfer_cutlass"}),
    "b300": ((10, 3), True, {}),
    "thor": ((11, 0), True, {}),
}
CHANGED = {"spark", "rtx", "spark named"}
FALLS_BACK = {
    "spark lora": "kernel does not support LoRA",
    "spark lora named": "kernel does not support LoRA",
    "spark without flashinfer": "FlashInfer's CUTLASS fused MoE is not installed",
}


BLACKWELL = {(8, 0): False, (9, 0): False, (10, 0): True, (10, 3): True, (11, 0): True, (12, 0): True, (12, 1): True}
DEVICES = [*(("CUDA", capability) for capability in BLACKWELL), ("CUDA", None), ("ROCM", (12, 0)), ("CPU", (10, 0))]


def ask(tree, vllm_process):
    """Ask `tree`'s vLLM everything; return the answers by name."""
    cases = [{"capability": c, "flashinfer": f, "config": config} for c, f, config in CASES.values()]
    programs = {
        "selections": (experts.PROGRAM, (), json.dumps({"cases": cases})),
        "blackwell": (HERE / "blackwell_class.py", (), json.dumps(DEVICES)),
        **{option: (HERE / "compile_once.py", (option,), "") for option in ("absent", "present")},
    }
    outputs = [vllm_process(tree).run(*program) for program in programs.values()]
    answers = {name: json.loads(output.splitlines()[-1]) for name, output in zip(programs, outputs, strict=True)}
    assert answers["selections"]["source"] == str(tree / "vllm")
    answers["selections"] = dict(zip(CASES, answers["selections"]["selections"], strict=True))
    return answers


@pytest.fixture(scope="module")
def pristine(trees, vllm_process):
    return ask(trees.upstream, vllm_process)


@pytest.fixture(scope="module")
def patched(trees, vllm_process):
    return ask(trees.patched, vllm_process)


@pytest.fixture(scope="module")
def before(pristine):
    return pristine["selections"]


@pytest.fixture(scope="module")
def after(patched):
    return patched["selections"]


def test_stock_vllm_picks_marlin_on_spark(before):
    assert before["spark"]["backend"] == before["rtx"]["backend"] == "MARLIN"
    assert "does not support quantization scheme" in before["spark named"]["error"]


@pytest.mark.parametrize("case", sorted(CHANGED))
def test_patched_vllm_picks_hardware_fp4_on_12x(after, case):
    assert (after[case]["backend"], after[case]["warnings"]) == (FP4, [])


@pytest.mark.parametrize("case", sorted(CASES.keys() - CHANGED - FALLS_BACK.keys()))
def test_everything_else_is_chosen_as_before(before, after, case):
    assert after[case] == before[case]
    assert case == "spark afp8" or after[case]["backend"] != FP4


@pytest.mark.parametrize(("case", "reason"), FALLS_BACK.items())
def test_fallback_keeps_the_stock_choice_and_logs_the_reason(before, after, case, reason):
    assert [after[case][key] for key in ("backend", "error")] == [before[case][key] for key in ("backend", "error")]
    assert [w for w in after[case]["warnings"] if STAYS_OFF + reason in w]


def test_choices_named_by_the_user_are_what_they_say(after):
    assert after["spark marlin"]["backend"] == "MARLIN"
    assert after["spark afp8"]["backend"] == FP4
    assert after["hopper"]["backend"].endswith("_BF16")


def test_blackwell_class_is_the_generation_and_no_family(patched):
    answers = patched["blackwell"]
    assert [answer[0] for answer in answers] == [*BLACKWELL.values(), False, False, False]
    assert [answer[1] for answer in answers[:7]] == [capability[0] == 10 for capability in BLACKWELL]


def test_stock_vllm_has_no_blackwell_class(pristine):
    assert pristine["blackwell"] == [None] * len(DEVICES)


def test_compiling_without_the_inductor_option_fails_only_in_stock_vllm(pristine, patched):
    assert "assume_32bit_indexing does not exist" in pristine["absent"]["error"]
    assert patched["absent"] == {"error": None, "result": 64.0, "option_set": False}


def test_the_inductor_option_is_still_set_where_torch_has_it(patched):
    assert patched["present"] == {"error": None, "result": 64.0, "option_set": True}
