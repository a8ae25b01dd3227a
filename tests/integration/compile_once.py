"""Compile a one-line module with vLLM's own decorator; run as a program inside the tree under test.

The argument says whether torch's inductor has the option assume_32bit_indexing (`present`) or not (`absent`, as in
NGC's early 2.10.0 builds). Prints {"error": …, "result": …, "option_set": …}.
"""

import json
import sys

import torch
from torch import nn
from torch._inductor import config as inductor
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

OPTION = "assume_32bit_indexing"
patched_options = []


def spy_on_options():
    """Record the names of all patched options, and apply the patches."""
    kind = type(inductor)
    real = kind.patch

    def patch(self, *args, **options):
        patched_options.extend(options)
        return real(self, *args, **options)

    kind.patch = patch


@support_torch_compile
class AddOne(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):  # noqa: ARG002
        super().__init__()

    def forward(self, x: torch.Tensor):
        return x + 1


def main():
    if sys.argv[1] == "absent":
        del inductor._config[OPTION]
    spy_on_options()
    # vLLM sets the options for every backend; this backend starts no C++ compiler.
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="eager")
    config = VllmConfig(compilation_config=compilation)
    error = result = None
    with set_current_vllm_config(config):
        module = AddOne(vllm_config=config)
        try:
            with set_forward_context(None, config):
                result = module(torch.ones(4, 8)).sum().item()
        except AttributeError as raised:
            error = str(raised)
    print(json.dumps({"error": error, "result": result, "option_set": OPTION in patched_options}))


main()
