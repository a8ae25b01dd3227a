"""Compare the data of the stacks for a Spark with the cited sources, vLLM's and FlashInfer's own archives."""

import ast
import re

import pytest

from lab.upstream import hidden
from sparkforge import pins
from sparkforge.compile.flashinfer import sets
from sparkforge.compile.vllm import sources as vllm_sources
from sparkforge.core.paths import ROOT
from sparkforge.patching.series import Queue
from sparkforge.sources import trees

pytestmark = pytest.mark.integration
OTHER_DEVICES = {"_C", "_rocm_C", "_C_AVX2", "_C_AVX512"}


def source(component):
    filename = next(name for name in component.files if name.endswith(".tar.gz"))
    trees.unpack_archive(component, filename)
    return trees.tree_folder(component, filename)


@pytest.fixture(scope="module", params=["spark", "spark-next"])
def stack(request):
    return pins.load().stack(request.param)


@pytest.fixture(scope="module")
def vllm(stack):
    return source(stack.components["vllm"])


def test_what_the_build_would_fetch_by_git_is_pinned(stack, vllm):
    hidden.check(hidden.declared(vllm), "vllm", stack.git)


def test_every_call_of_a_kernel_is_at_its_line(stack, vllm):
    kernels = sets.load(stack.components["flashinfer"].version)
    for call in kernels.calls.values():
        assert call.text in (vllm / call.file).read_text().splitlines()[call.line - 1], call


def test_every_cmake_target_is_in_the_table_at_its_line(stack, vllm):
    table = vllm_sources.load_targets(stack.components["vllm"].version)
    paths = {target.where.partition(":")[0] for target in table.targets.values()}
    files = {path: (vllm / path).read_text() for path in paths}
    defined = {name for text in files.values() for name in re.findall(r"define_extension_target\(\s*(\w+)", text)}
    defined |= {name for text in files.values() for name in re.findall(r"add_custom_target\((\w+)", text)}
    defined |= set(re.findall(r'CMakeExtension\(name="[\w.]*?(\w+)"', (vllm / "setup.py").read_text()))
    assert set(table.targets) == defined - OTHER_DEVICES
    for name, target in table.targets.items():
        path, _, line = target.where.partition(":")
        first, second = files[path].splitlines()[int(line) - 1 : int(line) + 1]
        assert re.match(r"\s*(define_extension_target|add_custom_target|FetchContent_MakeAvailable)\(", first)
        assert "define" not in first or second.strip() == name
    for name, option in table.repositories.items():
        assert option.variable == stack.git[name].src_dir


def test_the_sink_modules_have_the_names_that_the_patched_wrapper_requests(stack):
    component = stack.components["flashinfer"]
    tree, queue = source(component), Queue.load(ROOT / "patches" / component.patches)
    path = "flashinfer/attention/_core.py"
    text = (tree / path).read_bytes()
    for change in (change for patch in queue.patches for change in patch.changes if change.path == path):
        text = change.apply(text)
    name = "BatchAttentionWithAttentionSinkWrapper"
    (wrapper,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    assigned = [node for node in ast.walk(wrapper) if isinstance(node, ast.Assign)]
    parts = {getattr(node.targets[0], "id", ""): node.value for node in assigned}
    name = compile(ast.Expression(parts["jit_args"].elts[0]), "wrapper", "eval")
    modules = [module for module in sets.load(component.version).module if module.call == "prefill"]
    assert len(modules) == 4
    for module in modules:
        scope = {
            "backend": "fa2", "q_data_type": "bf16", "head_dim_qk": 64, "head_dim_vo": 64,
            "kv_data_type": "e4m3" if module.audit.endswith("_fp8") else "bf16",
            "window_left": 127 if "swa_True" in module.name else -1,
            "filename_safe_dtype_map": {"bf16": "bf16", "e4m3": "e4m3"},
        }  # fmt: skip
        assert eval(name, scope) == module.name  # noqa: S307 - an f-string of the pinned archive
        assert {key.value for key in parts["jit_kwargs"].keys} <= module.arguments.keys()
