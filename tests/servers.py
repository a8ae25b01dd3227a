"""Records of servers."""

import os

from sparkforge.core.process import started_at
from sparkforge.serve.record import Server


def recorded(port=9, pid=None, container="", **more):
    """Return the record of a server: a container, or a process, by default this one, which outlives the test."""
    pid = 0 if container else os.getpid() if pid is None else pid
    fields = {"host": "127.0.0.1", "model": "/m", "model_id": "m", "device": "docker" if container else "embedded"}
    fields |= {"log": "", "container": container, **more}
    return Server(pid=pid, started=started_at(pid) or 0.0, port=port, **fields)
