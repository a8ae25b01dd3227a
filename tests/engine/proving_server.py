"""Stands for vLLM in a container: it answers what a start must prove, so that a start takes seconds, not minutes."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the image's PYTHONSAFEPATH leaves it out
from fake_api import Api, Server  # tests/fake_api.py, copied beside this file

if os.environ.get("SPARKFORGE_MODEL") == "/models/gone":
    sys.exit(1)
# The folder of compiled code, as deploy/start names it.
Path("/var/cache/sparkforge", Path("/opt/sparkforge/key").read_text().strip()).mkdir(exist_ok=True)
Server(("0.0.0.0", 8000), Api).serve_forever()  # noqa: S104
