"""Makes vLLM look at a model's class in a fork of the process that asks, when this is imported; it imports vLLM.

vLLM starts an interpreter for that, which imports vLLM again: 9 s of a core for each text of a model's file.
"""

import multiprocessing

from vllm.model_executor.models import registry

context = multiprocessing.get_context("fork")


def run_in_a_fork(function):
    """Return what `function` returns in a fork of this process. Raises EOFError if it fails there."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function()))
    process.start()
    sender.close()  # else nothing ends the wait for a process that failed
    try:
        return receiver.recv()
    finally:
        process.join()


assert callable(registry._run_in_subprocess)
registry._run_in_subprocess = run_in_a_fork
