"""Replaces the embedded environment's interpreter: a validator, and a server that answers the start-up test calls.

Files in its folder control it: `refuse` makes the validator refuse, `die` makes the server end immediately, and with
`share` the server creates shared memory and opens it repeatedly by name, as vLLM's processes do while they start.
`validations` counts the validations.
"""

import os
import sys
import threading
import time
import traceback
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

HERE = Path("/var/lib/stand-in")
sys.path.insert(0, str(HERE))


def share():
    """Open shared memory by its name ten times a second; when it is gone, end like a failed server."""
    memory = SharedMemory(create=True, size=4096)
    (HERE / "shared").write_text(memory.name)
    while True:
        try:
            SharedMemory(memory.name).close()
        except FileNotFoundError:
            traceback.print_exc()
            os._exit(1)
        time.sleep(0.1)


def main(arguments):
    if "validate" in arguments:
        with (HERE / "validations").open("a") as file:
            file.write("1\n")
        refused = (HERE / "refuse").exists()
        print("FAIL stand-in\n  next: rm refuse" if refused else "serve: the server may start")
        return 30 if refused else 0
    with (HERE / "starts").open("a") as file:
        file.write("1\n")
    if (HERE / "die").exists():
        return 1
    if (HERE / "share").exists():
        threading.Thread(target=share, daemon=True).start()
    port = next(word.partition("=")[2] or arguments[at + 1] for at, word in enumerate(arguments) if "--port" in word)
    from fake_api import Api, Server  # tests/fake_api.py, which test_service.py copies here

    Server(("127.0.0.1", int(port)), Api).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
