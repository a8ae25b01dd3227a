"""The README's examples run unchanged, and every name in its table of the API exists.

test_hub_repository.py runs the hub's example; Sparkforge's tests run vLLM's.
"""

import importlib
import inspect
import re

import pytest

from project import PROJECT
from spark_mxfp4.kernel import MoeKernel

README = (PROJECT / "README.md").read_text(encoding="utf-8")


def example(heading):
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    return re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1]


def run(heading):
    names = {"__name__": "example"}
    exec(compile(example(heading), f"README, {heading}", "exec"), names)  # noqa: S102 - the page's own code
    return names


def test_torch():
    names = run("torch")
    assert names["y"].shape == (5, 64)
    assert names["y"].isfinite().all()


def test_transformers():
    from spark_mxfp4.hf import PackedExperts

    names = run("transformers")
    assert names["tokens"].shape[0] == 1
    assert 3 < names["tokens"].shape[1] <= 7
    assert all(isinstance(layer.mlp.experts, PackedExperts) for layer in names["model"].model.layers)


def test_your_own_kernel():
    from spark_mxfp4 import conformance

    conformance.check(run("Your own kernel")["Fast"]("fast"))


def test_every_python_block_is_run_by_a_test():
    blocks = re.findall(r"^```python\n", README, re.MULTILINE)
    headings = ("torch", "transformers", "vLLM", "Your own kernel", "Hugging Face's hub")
    assert len(blocks) == len({example(heading) for heading in headings})


# vllm.plugin's row needs vLLM.
ROWS = [row for row in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", README, re.MULTILINE) if row[0] != "vllm.plugin"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_name_in_the_api_table_exists(row):
    module, content = row
    value = importlib.import_module(f"spark_mxfp4.{module}")
    names = [name.partition("(")[0] for name in re.findall(r"`([\w.]+)(?:\([\w, ]*\))?`", content.partition(":")[0])]
    assert names
    for name in names:
        part = value
        for attribute in name.split("."):
            part = getattr(part, attribute)
        assert part.__doc__ if callable(part) else part


PAGE = (PROJECT / "docs" / "reference.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (spark_mxfp4\.[\w.]+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
SIGNATURES = [
    (module, name, parameters)
    for module, text in SECTIONS
    for name, parameters in re.findall(r"^- `([\w.]+)\(([^)]*)\)`", text, re.MULTILINE)
]


@pytest.mark.parametrize(("module", "name", "parameters"), SIGNATURES, ids=".".join)
def test_the_reference_has_the_names_and_parameters_of_the_code(module, name, parameters):
    value = importlib.import_module(module)
    for attribute in name.split("."):
        value = getattr(value, attribute)
    actual = [parameter for parameter in inspect.signature(value).parameters if parameter != "self"]
    assert parameters.split(", ") == actual


def test_the_reference_has_every_public_function_and_method():
    assert len(SIGNATURES) > 25
    for module, text in SECTIONS:
        if module in {"spark_mxfp4.kernels.linear", "spark_mxfp4.hf"}:
            continue  # their own pages describe both
        public = {
            name
            for name, value in vars(importlib.import_module(module)).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module and inspect.isfunction(value)
        }
        listed = {name for owner, name, _ in SIGNATURES if owner == module}
        assert public - listed <= {"main", "check_packed", "poisoned", "is_kernel_class"}, text[:40]
    methods = {n for n, value in vars(MoeKernel).items() if not n.startswith("_") and inspect.isfunction(value)}
    assert methods == {name.removeprefix("MoeKernel.") for _, name, _ in SIGNATURES if name.startswith("MoeKernel.")}
