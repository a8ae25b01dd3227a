"""One endpoint for independent servers: HAProxy's configuration, and how it is started.

HAProxy is the distribution's package on the head. It sends a request to the server with the fewest open ones; requests
with the same `X-Session-Id` go to the same server, whose prefix cache has the conversation. It passes headers, such as
the API key, and streamed answers on as they come. A server that does not answer /health gets no requests.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sparkforge.core.errors import UsageError
from sparkforge.serve.cluster.config import ClusterConfig
from sparkforge.serve.plan import LOOPBACK

PROGRAM = "haproxy"
FILE = "haproxy.cfg"
SYSTEM_FOLDERS = ":/usr/local/sbin:/usr/sbin"  # Debian leaves them out of a user's PATH
# An answer may take as long as it likes, and so may the pause before a client's next request. `redispatch` and
# `retry-on conn-failure`: a request that a dead server never got goes to another one; one that it got is not repeated.
TEMPLATE = """\
# Written by ./inv cluster.up from cluster.toml.
global
    log stdout format raw daemon notice
    maxconn 4096

defaults
    mode http
    log global
    timeout connect 5s
    timeout http-request 60s
    timeout client 1h
    timeout server 1h
    retries 2
    retry-on conn-failure
    option redispatch 1

frontend api
    bind {bind}
    use_backend sessions if {{ req.hdr(x-session-id) -m found }}
    default_backend servers

backend servers
    balance leastconn
    option httpchk
    http-check send meth GET uri /health ver HTTP/1.1 hdr Host {bind}
{checked}

backend sessions
    balance hdr(x-session-id)
    hash-type consistent
{tracked}
"""


def program() -> str:
    """Return HAProxy's path. Raises UsageError if it is not installed."""
    if path := shutil.which(PROGRAM, path=os.environ.get("PATH", os.defpath) + SYSTEM_FOLDERS):
        return path
    why = "it is the endpoint of independent servers"
    raise UsageError(f"{PROGRAM} is not installed on the head", why, f"sudo apt install {PROGRAM}")


def text(config: ClusterConfig) -> str:
    """Return HAProxy's configuration."""
    addresses = [(node.name, f"{node.address}:{config.replica_port}") for node in config.nodes]
    checked = "\n".join(f"    server {name} {address} check inter 2s fall 2 rise 2" for name, address in addresses)
    tracked = "\n".join(f"    server {name} {address} track servers/{name}" for name, address in addresses)
    return TEMPLATE.format(bind=f"{LOOPBACK}:{config.port}", checked=checked, tracked=tracked)


def command(file: Path) -> tuple[str, ...]:
    """Return the command that runs it in the foreground. Raises what `program` raises."""
    return (program(), "-db", "-f", str(file))
