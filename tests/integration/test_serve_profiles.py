"""The parser of each stack's own vLLM takes each flag of each serve profile, and makes of it what it says."""

import json
import os
import subprocess
import sys

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
told = {"version": version}
for name, words in json.loads(sys.argv[1]).items():
    made = parser.parse_args(["--model", "/x", *words])
    quantised = made.quantization_config
    told[name] = {
        "moe": made.moe_backend, "attention": str(made.attention_backend), "seqs": made.max_num_seqs,
        "activation": str(quantised.moe.activation) if quantised else "", "length": made.max_model_len,
        "sizes": made.compilation_config.cudagraph_capture_sizes, "share": made.gpu_memory_utilization,
    }
print("TOLD" + json.dumps(told))
"""


@pytest.fixture(scope="module", params=["spark", "spark-next"])
def parsed(request):
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    if request.param == "spark-next":  # the other stack's version is the installed one
        environment["PYTHONPATH"] = str(request.getfixturevalue("next_trees").upstream)
    words = json.dumps({name: profile.arguments() for name, profile in profiles.load(stack=request.param).items()})
    command = [sys.executable, "-P", "-c", PROGRAM, words, deep_child.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.partition("TOLD")[2])
    assert told["version"].partition("+")[0] == pins.load().component(request.param, "vllm").version
    return told


@pytest.mark.parametrize("name", ["safe", "fast", "long-context"])
def test_the_hardware_path_is_what_vllm_reads(parsed, name):
    told = parsed[name]
    assert told["moe"] == "flashinfer_cutlass"
    assert "FLASHINFER" in told["attention"]
    assert "f8e4m3fn" in told["activation"]
    assert "col=32" in told["activation"]  # blocks of 32, which is MX
    assert {5, 10} <= set(told["sizes"])
    assert told["sizes"][-1] >= told["seqs"]
    assert told["share"] <= 0.83


def test_long_context_is_the_models_own_limit(parsed):
    assert parsed["long-context"]["length"] == 131072


def test_the_embedded_profile_is_read_too(parsed):
    assert parsed["embedded"]["seqs"] == 16
    assert parsed["embedded"]["activation"] == ""
