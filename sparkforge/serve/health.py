"""`python3 -m sparkforge.serve.health`: the container's HEALTHCHECK. Exit code 0: validated, started and answering.

It requires the readiness file, which is written only after validation (`sparkforge/serve/entrypoint.py`), an unchanged
API key in its file, and 200 from /health on the loopback address. It runs twice a minute beside the server, so it
imports the standard library only.
"""

import http.client
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from sparkforge.core.errors import SparkforgeError
from sparkforge.serve import access

READY = "ready"  # in SPARKFORGE_RUN; JSON with `host` and `port`, which is 0 for a server without an API
HELD_FILE = "held"  # there too: why a container that stays up starts no server, or waits to validate again
REFUSED = "refused"  # how that text begins after a refusal
LONGEST_WORDS = 500
RUN = "/run/sparkforge"
SECONDS = 3.0


def look(run: Path) -> str:
    """Return why the server is not healthy; empty if it is."""
    try:
        ready = json.loads((run / READY).read_text(encoding="utf-8"))
        host, port = str(ready["host"]), int(ready["port"])
    except FileNotFoundError:
        with suppress(OSError):
            if held := (run / HELD_FILE).read_text(encoding="utf-8", errors="replace")[:LONGEST_WORDS]:
                return held
        return f"no {run / READY}: the validation has not passed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot read {run / READY}: {error}"
    try:  # Docker mounts the key's file anew when it starts a container, but the server reads it once
        key, path = access.configured_key(os.environ)
    except SparkforgeError as error:
        return f"{error.what}: {error.why}"
    if key and access.digest(key) != str(ready.get("key", "")):
        return f"the API key in {path} is not the one that the server started with: restart the container"
    return _ask(host, port) if port else ""  # a worker of a cluster has no API: Docker says whether it runs


def _ask(host: str, port: int) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=SECONDS)  # not urllib: it would obey http_proxy
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{host}:{port}/health does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
    return "" if status == http.client.OK else f"{host}:{port}/health answered {status}"


def main() -> int:
    """Print the verdict in one line, which `docker inspect` shows, and return the exit code."""
    why = look(Path(os.environ.get("SPARKFORGE_RUN") or RUN))
    sys.stdout.write(f"{why or 'healthy'}\n")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
