"""`python -m sparkforge.serve.forked_vllm MODULE ARGUMENTS…`: run vLLM on a CPU with forks, not new interpreters.

vLLM's CPU platform starts a new interpreter for the engine, for each worker, and to inspect the model's class. Each one
imports vLLM again, which takes 6 to 9 s of a core; a fork shares the import. The engine also runs the model in its own
process, because a separate worker spin-waits and occupies one of two cores. A fork keeps the OpenMP threads of its
parent, so vLLM cannot bind threads to cores. That costs speed, so only the tiny model is served this way.

Copying the tiny model's tokenizer writes and parses 12 MB of JSON, which takes over a second. Two copies are left out:
the one that transformers makes of a tokenizer which nobody else uses, and the second of vLLM's pool, which is made
when two threads need a tokenizer at once.
"""

import multiprocessing
import os
import re
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transformers import tokenization_utils_tokenizers
from vllm.model_executor.models import registry
from vllm.renderers import hf

IN_THE_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # on a CPU vLLM replaces `uni` with `mp`
get_context = multiprocessing.get_context
fork = get_context("fork")


def _context(method: str | None = None) -> Any:
    return get_context("fork" if method == "spawn" else method)


def _run_in_a_fork(function: Callable[[], Any]) -> Any:
    """Return what `function` returns in a fork of this process. Raises EOFError if it fails there."""
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(function()))
    process.start()
    sender.close()  # otherwise nothing ends the wait for a process that failed
    try:
        return receiver.recv()
    finally:
        process.join()


if not callable(registry._run_in_subprocess):  # noqa: SLF001 - vLLM has no public hook
    raise TypeError("vLLM's inspection of models differs from 0.32.0")
registry._run_in_subprocess = _run_in_a_fork  # noqa: SLF001
multiprocessing.get_context = _context
os.environ["OMP_NUM_THREADS"] = "1"
tokenization_utils_tokenizers.copy = SimpleNamespace(deepcopy=lambda tokenizer: tokenizer)
make_pool = hf.maybe_make_thread_pool
hf.maybe_make_thread_pool = lambda tokenizer, _copies: make_pool(tokenizer)

if __name__ == "__main__":
    del sys.argv[0]
    if not any(re.match(r"-[tpd]p|--.*parallel", word) for word in sys.argv):
        sys.argv[1:1] = ["--distributed-executor-backend", IN_THE_ENGINE]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
