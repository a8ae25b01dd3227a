"""The parser of each stack's own vLLM takes each flag of each serve profile, and makes of it what it says."""

import json

import pytest

from sparkforge import pins
from sparkforge.serve import profiles
from validate.facts import deep_child

pytestmark = pytest.mark.integration
PROGRAM = """
import json, runpy, sys
from vllm import __version__ as version
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = runpy.run_path(sys.argv[2])["server_options"]().make_arg_parser(FlexibleArgumentParser())
answers = {"version": version}
for name, words in json.loads(sys.argv[1]).items():
    options = parser.parse_args(["--model", "/x", *words])
    quantised = options.quantization_config
    answers[name] = {
        "moe": options.moe_backend, "attention": str(options.attention_backend), "seqs": options.max_num_seqs,
        "quantization": options.quantization,
        "activation": str(quantised.moe.activation) if quantised else "", "length": options.max_model_len,
        "sizes": options.compilation_config.cudagraph_capture_sizes, "share": options.gpu_memory_utilization,
    }
print(json.dumps(answers))
"""


@pytest.fixture(scope="module", params=["spark", pytest.param("spark-next", marks=pytest.mark.nightly)])
def parsed(request, vllm_process, tmp_path_factory):
    stack = request.param
    trees = request.getfixturevalue("vllm_trees" if stack == "spark" else "next_trees")
    tree = trees.patched if stack == "spark" else trees.upstream
    arguments = json.dumps({name: profile.arguments() for name, profile in profiles.load(stack=stack).items()})
    program = tmp_path_factory.mktemp("parser") / "program.py"
    program.write_text(PROGRAM)
    output = vllm_process(tree).run(program, (arguments, deep_child.__file__))
    answers = json.loads(output.splitlines()[-1])
    assert answers["version"].partition("+")[0] == pins.load().component(stack, "vllm").version
    return answers


@pytest.mark.parametrize("name", ["safe", "fast", "long-context"])
def test_the_hardware_path_is_what_vllm_reads(parsed, name):
    options = parsed[name]
    assert options["moe"] == "flashinfer_cutlass"
    assert "FLASHINFER" in options["attention"]
    assert "f8e4m3fn" in options["activation"]
    assert "col=32" in options["activation"]  # blocks of 32, which is MX
    assert {5, 10} <= set(options["sizes"])
    assert options["sizes"][-1] >= options["seqs"]
    assert options["share"] <= 0.83


def test_our_experts_are_a_profile_of_their_own(parsed):
    options, safe = parsed["spark-mxfp4"], parsed["safe"]
    assert options["quantization"] == "spark-mxfp4"
    assert (options["moe"], options["activation"]) == ("auto", "")  # nothing of vLLM's own choice of experts
    same = ("attention", "seqs", "length", "sizes", "share")
    assert [options[name] for name in same] == [safe[name] for name in same]
