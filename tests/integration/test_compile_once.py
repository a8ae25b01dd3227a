"""Patch 0003: vLLM compiles a model with a torch that lacks an option of inductor, as NGC's early builds of 2.10.0 do.

The other patches are tested in test_routing_patch.py, test_validate_deep.py and their submissions' own tests.
"""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
COMPILED = {"error": None, "result": 64.0}


@pytest.mark.parametrize(
    ("tree", "option", "answer"),
    [
        ("upstream", "absent", {}),
        ("patched", "absent", {**COMPILED, "option_set": False}),
        ("patched", "present", {**COMPILED, "option_set": True}),
    ],
)
def test_only_stock_vllm_needs_the_option(vllm_process, release, tree, option, answer):
    output = vllm_process(vars(release)[tree]).run(Path(__file__).with_name("compile_once.py"), (option,))
    compiled = json.loads(output.splitlines()[-1])
    assert compiled == answer if answer else "assume_32bit_indexing does not exist" in compiled["error"]
