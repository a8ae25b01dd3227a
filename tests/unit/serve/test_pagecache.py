"""Files of weights leave the page cache once they were read: asked of the kernel by mincore."""

import os
import signal
import sys
import time

import pytest

from sparkforge.core.paths import ROOT
from sparkforge.serve import pagecache
from sparkforge.serve.supervise import run

SIZE = 8 << 20


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a file of weights in the page cache, written to the disk, beside one that is no weights."""
    for name in ("model-00001.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(os.urandom(SIZE))
        with (tmp_path / name).open("rb") as file:
            os.fsync(file.fileno())
            file.read()
    if pagecache.resident(tmp_path / "model-00001.safetensors") != SIZE:
        pytest.skip("the page cache of this file system cannot be seen")
    pagecache.drop([tmp_path / "model-00001.safetensors"])
    if pagecache.resident(tmp_path / "model-00001.safetensors"):
        pytest.skip("this file system keeps its files in memory")
    (tmp_path / "model-00001.safetensors").read_bytes()
    return tmp_path


def test_what_was_read_is_dropped_and_the_rest_stays(checkpoint):
    weights, other = checkpoint / "model-00001.safetensors", checkpoint / "tokenizer.json"
    assert pagecache.weights(str(checkpoint)) == [weights]
    assert pagecache.resident(weights) == SIZE
    pagecache.drop([weights, checkpoint / "gone.safetensors"])
    assert pagecache.resident(weights) == 0
    assert pagecache.resident(other) == SIZE


def test_an_empty_file_holds_nothing(tmp_path):
    (tmp_path / "empty.safetensors").touch()
    assert pagecache.resident(tmp_path / "empty.safetensors") == 0


def test_a_supervised_server_leaves_no_weights_in_the_cache(checkpoint, monkeypatch):
    monkeypatch.setattr(pagecache, "PERIOD_SECONDS", 0.05)
    weights = checkpoint / "model-00001.safetensors"
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = os.fork()
    if not child:  # it becomes a supervisor, and its server waits until the weights have gone
        code = (
            f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
            "from pathlib import Path\nfrom sparkforge.serve import pagecache\n"
            "end = time.monotonic() + 60\n"
            f"while pagecache.resident(Path({str(weights)!r})):\n"
            "    time.monotonic() > end and sys.exit(9)\n    time.sleep(0.05)\n"
            "sys.exit(7)"
        )
        os._exit(run((sys.executable, "-c", code), None, str(checkpoint)).code)
    deadline = time.monotonic() + 120
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(status) == 7
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == former
