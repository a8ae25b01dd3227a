"""Wait for effects of other processes."""

import time


def wait_for(condition, seconds=120.0, why=lambda: "it did not come in time"):
    """Return the first true result of `condition`; fail with `why()` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)
    return value
