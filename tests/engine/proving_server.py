"""Replaces vLLM in a container: it answers the start-up test calls, so that a start takes seconds, not minutes."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the image's PYTHONSAFEPATH leaves it out
from fake_api import Api, Server  # tests/fake_api.py, copied beside this file

if "--no-such-flag" in os.environ.get("VLLM_ARGS", ""):
    sys.exit(1)
# Fake compiled code in the folder that deploy/start gives to vLLM, where earlier servers of the same image wrote too.
compiled = Path(os.environ["VLLM_CACHE_ROOT"], "starts")
compiled.parent.mkdir(parents=True, exist_ok=True)
with compiled.open("a") as file:
    file.write(os.environ["SPARKFORGE_SERVE_PROFILE"] + "\n")
Server(("0.0.0.0", 8000), Api).serve_forever()  # noqa: S104
