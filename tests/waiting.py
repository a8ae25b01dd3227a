"""Wait for effects of other processes."""

import time


def wait_for(condition, seconds=120.0, why=lambda: "it did not come in time", pause=0.02):
    """Return the first true result of `condition`; fail with `why()` after `seconds`. `pause` seconds between tries."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, why()
        time.sleep(pause)
    return value
