"""vLLM's own parser takes every flag of every serve profile, and makes of it what the profile says."""

import json

import pytest

from serve import profiles

pytestmark = pytest.mark.integration
PROGRAM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
told = {}
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


@pytest.fixture(scope="module")
def parsed():
    import subprocess
    import sys

    words = json.dumps({name: profile.words() for name, profile in profiles.load().items()})
    done = subprocess.run([sys.executable, "-c", PROGRAM, words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.partition("TOLD")[2])


@pytest.mark.parametrize("name", ["safe", "fast", "long-context"])
def test_the_hardware_path_is_what_vllm_reads(parsed, name):
    told = parsed[name]
    assert told["moe"] == "flashinfer_cutlass"
    assert "FLASHINFER" in told["attention"]
    assert "f8e4m3fn" in told["activation"]
    assert "col=32" in told["activation"]  # blocks of 32, which is MX
    assert {5, 10} <= set(told["sizes"])
    assert told["sizes"][-1] >= told["seqs"]
    assert told["share"] <= 0.85


def test_long_context_is_the_models_own_limit(parsed):
    assert parsed["long-context"]["length"] == 131072


def test_the_embedded_profile_is_read_too(parsed):
    assert parsed["embedded"]["seqs"] == 16
    assert parsed["embedded"]["activation"] == ""
