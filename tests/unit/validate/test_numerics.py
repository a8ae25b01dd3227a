"""The numerics check detects wrong kernels: each mutation is a mistake that a kernel's author could make."""

import json
from dataclasses import replace

import pytest
from programs import write_files

from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts import numerics_child as child
from validate.facts.child import NUMERICS, Outcome, gather, not_run, way_of
from validate.facts.fact import Fact
from validate.facts.target import Options, Target

# Faults as the body of `kernel(x, weights, ids, topk)`; `moe` and `experts` are the correct modules.
MUTATIONS = {
    "every scale twice as large": "return moe(x, both(weights, lambda p: p._replace(scales=p.scales + 1)), ids, topk)",
    "no clamp": "return moe(x, weights, ids, topk, None, experts.GPT_OSS._replace(limit=1e9))",
    "gate and up swapped": "return moe(x, weights._replace(gate_up=swapped(weights.gate_up)), ids, topk)",
    "one token lost": "out = moe(x, weights, ids, topk)\n    out[3] = 0\n    return out",
    "a NaN": "out = moe(x, weights, ids, topk)\n    out[0, 0] = float('nan')\n    return out",
}
MODULE = """
import os, time
from spark_mxfp4 import experts
from spark_mxfp4.experts import moe

def both(weights, change):
    return type(weights)(*map(change, weights))

def swapped(projection):
    return both(projection, lambda rows: None if rows is None else rows.unflatten(1, (-1, 2)).flip(2).flatten(1, 2))

def kernel(x, weights, ids, topk, expert_map=None):
    {body}
"""


def judge(facts):
    return evaluate(CHECKS["numerics"], View(facts))


def test_the_kernel_of_this_checkout_is_right(environment):
    facts, _ = gather(Target(Options(environ=environment()), "embedded"), NUMERICS)
    assert facts["numerics.kernel"].value == "spark_mxfp4 torch"
    assert 0 < facts["numerics.difference"].value < 0.01
    finding = judge(facts)
    assert finding.status is Status.PASS
    assert "differs from the reference by 0.30%" in finding.evidence


@pytest.fixture
def computed(tmp_path, monkeypatch):
    """Return a function that computes the facts with the child's program in this process, which has imported torch."""

    def run(_target, programs):
        answers = tmp_path / "answers"
        child.main(json.dumps(programs[0].request), str(answers))
        entries = map(json.loads, answers.read_text().splitlines())
        return [Outcome({entry["name"]: entry for entry in entries})]

    def computed(body, kernel=""):
        name = f"mutant_{tmp_path.name}"  # a unique name, because imported modules stay
        (tmp_path / f"{name}.py").write_text(MODULE.format(body=body))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("SPARK_MXFP4_KERNEL", kernel or f"{name}:kernel")
        monkeypatch.setattr("validate.facts.child.run_programs", run)
        return gather(Target(Options(), "embedded"), NUMERICS)[0]

    return computed


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_refused(computed, name):
    facts = computed(MUTATIONS[name])
    assert facts["numerics.kernel"].value.startswith("spark_mxfp4 mutant")
    finding = judge(facts)
    assert finding.status is Status.FAIL, finding.evidence
    assert not facts["numerics.difference"].value <= child.TOLERANCE["mxfp8"] * 1.5  # beyond MXFP8's tolerance, or NaN


def test_a_kernel_that_hangs_times_out(tmp_path, environment, monkeypatch):
    """A fake program prints its kernel's name, as the child does before it computes (see the next test), and hangs."""
    fact = json.dumps({"name": "numerics.kernel", "value": "slow"})
    (tmp_path / "child.py").write_text(f"import sys, time; open(sys.argv[2], 'w').write({fact!r}); time.sleep(600)")
    monkeypatch.setattr("validate.facts.child.NUMERICS_CHILD", tmp_path / "child.py")
    facts, _ = gather(Target(Options(environ=environment(), numerics_seconds=3.0), "embedded"), NUMERICS)
    assert facts["numerics.kernel"].value == "slow"
    finding = judge(facts)
    assert finding.status is Status.FAIL
    assert "did not answer within 3 s" in finding.evidence


def test_the_kernel_that_will_serve_is_the_one_that_runs(environment):
    for stack, arguments, kernel, way in (
        ("embedded", (), "", "plugin"), ("spark", (), "", "vllm"),
        ("spark", ("--quantization", "spark-mxfp4"), "", "plugin"),
        ("spark", ("--quantization=spark-mxfp4",), "fast_moe:FastMoe", "plugin"),
        ("spark-next", ("--quantization=spark-mxfp4",), "vllm", "vllm"),  # the profiles fast-dense-8 and -4
        ("spark", ("--quantization", "mxfp4"), "triton", "vllm"),
    ):  # fmt: skip
        options = Options(serve_args=arguments, environ=environment(SPARK_MXFP4_KERNEL=kernel))
        assert way_of(Target(options, stack)) == way


LAID_OUT = """
from spark_mxfp4.experts import moe
from spark_mxfp4.kernel import MoeKernel

class Wide(MoeKernel):
    hidden_alignment = intermediate_alignment = 256
    cuda_graphs = False

    def prepare(self, weights):
        return weights._replace(down=weights.down._replace(weight=weights.down.weight.flip(0)))

    def run(self, x, weights, ids, topk, expert_map=None):
        assert x.shape[-1] == 256
        down = weights.down._replace(weight=weights.down.weight.flip(0))
        return moe(x, weights._replace(down=down), ids, topk)

    def variant(self, prepared):
        return "backwards"
"""


def test_a_kernel_gets_its_own_sizes_and_layout(computed, tmp_path):
    (tmp_path / "wide_kernel.py").write_text(LAID_OUT)
    facts = computed("pass", kernel="wide_kernel:Wide")
    assert facts["numerics.kernel"].value == "spark_mxfp4 wide_kernel:Wide (backwards)"
    assert judge(facts).status is Status.PASS


def test_without_a_compiled_module_the_spark_warns_and_computes_nothing(site, install, environment, tmp_path):
    install(site, "flashinfer-python", "0.7.0.post1")
    target = Target(Options(python=site.parent / "python", environ=environment(HOME=str(tmp_path))), "spark")
    facts, _ = gather(target, NUMERICS)
    finding = judge(facts)
    assert facts["numerics.state"].value == "not compiled"
    assert finding.status is Status.WARN
    assert "./inv build.kernels" in finding.fix


@pytest.mark.parametrize(
    "folder", [".cache/flashinfer/0.7.0.post1/121a/cached_ops", "site-packages/flashinfer/data/aot"]
)
def test_a_compiled_module_is_found_where_flashinfer_looks(site, install, environment, tmp_path, folder):
    install(site, "flashinfer-python", "0.7.0.post1")
    write_files(site, {"flashinfer/__init__.py": ""})
    options = Options(python=site.parent / "python", environ=environment(HOME=str(tmp_path)))
    filtered = replace(options, environ={**options.environ, "FLASHINFER_MOE_SM120_DTYPES": "fp8xfp4"})
    for asked, name in ((options, "fused_moe_120"), (filtered, "fused_moe_120_fp8xfp4")):
        assert not_run(Target(asked, "spark"))  # FlashInfer would load another module
        write_files(tmp_path / folder / name, {f"{name}.so": ""})
        assert not not_run(Target(asked, "spark"))


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"graph_difference": 0.0}, Status.PASS),
        ({"graph_difference": 1e-6}, Status.FAIL),
        ({"graph_difference": float("nan")}, Status.FAIL),
        ({"graph_difference": None}, Status.FAIL),  # on a GPU a graph is required
        ({"graph_difference": None, "device": "cuda, eager"}, Status.PASS),  # a kernel without graphs
        ({"difference": 0.11}, Status.FAIL),
        ({"difference": float("nan")}, Status.FAIL),
        ({"difference": None}, Status.FAIL),
    ],
)
def test_facts_of_a_gpu_are_judged(good, values, status):
    facts = good("spark") | {f"numerics.{name}": Fact(value, "test") for name, value in values.items()}
    assert judge(facts).status is status
