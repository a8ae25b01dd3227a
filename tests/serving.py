"""A real vLLM server for tests of its answers."""

import os
import time
from contextlib import contextmanager

from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.core.process import spawn, started_at, terminate_session


@contextmanager
def serving(launch, model, work, path=(ROOT,), **variables):
    """Start the server of a Launch in a session of its own, which logs to `work`/log; yield its Endpoint, then end it.

    `path` is the server's PYTHONPATH.
    """
    environment = {**os.environ, **launch.environment, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
    log, url = work / "log", f"http://127.0.0.1:{launch.plan.port}"
    pid = spawn(launch.command, log=log, env=environment, cwd=work)
    started, endpoint = started_at(pid), Endpoint(url, model, key="")
    try:
        up = endpoint.wait_until_serving(time.monotonic() + 600, lambda: started_at(pid) == started)
        assert up, log.read_text(errors="replace")[-3000:]
        yield endpoint
    finally:
        terminate_session(pid)
