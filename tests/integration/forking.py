"""Makes vLLM fork its engine and its workers, as it does for other devices; its CPU platform asks for new interpreters.

Each of those would import vLLM again, which takes 9 s of a core. Import this before vLLM starts a process, or run
`python forking.py MODULE ARGUMENTS...` in place of `python -m MODULE ARGUMENTS...`. test_road.py has vLLM's own way.
"""

import multiprocessing
import runpy
import sys
from pathlib import Path

get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)

if __name__ == "__main__":
    folder = str(Path(sys.argv.pop(0)).parent)  # not on the path of a server, and not needed there any more
    sys.path.append(folder)
    import fork_inspection  # noqa: F401 - it changes vLLM

    sys.path.remove(folder)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
