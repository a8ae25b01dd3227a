"""Files of weights leave the page cache once they were read: asked of the kernel by mincore."""

import ctypes
import mmap
import os
import signal
import sys

import pytest
from waiting import wait_for

from sparkforge.serve import pagecache
from sparkforge.serve.supervise import run

SIZE = 8 << 20


def resident(file):
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        window = (ctypes.c_char * SIZE).from_buffer(mapped)
        pages = ctypes.create_string_buffer(SIZE // mmap.PAGESIZE)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(window), ctypes.c_size_t(SIZE), pages)
        del window
        assert not failed
    return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a file of weights in the page cache, written to the disk, beside one that is no weights."""
    for name in ("model-00001.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(os.urandom(SIZE))
        with (tmp_path / name).open("rb") as file:
            os.fsync(file.fileno())
            file.read()
    weights = tmp_path / "model-00001.safetensors"
    if resident(weights) != SIZE:
        pytest.skip("the page cache of this file system cannot be seen")
    with weights.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(weights):
        pytest.skip("this file system keeps its files in memory")
    weights.read_bytes()
    return tmp_path


def test_a_supervised_server_leaves_no_weights_in_the_cache_and_the_rest_stays(checkpoint, monkeypatch):
    (checkpoint / "gone.safetensors").symlink_to("/nowhere")
    monkeypatch.setattr(pagecache, "PERIOD_SECONDS", 0.05)
    weights, former = checkpoint / "model-00001.safetensors", signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = os.fork()
    if not child:  # it becomes a supervisor, whose server runs for 20 seconds
        os._exit(run((sys.executable, "-c", "import time; time.sleep(20)"), None, str(checkpoint)).code)
    wait_for(lambda: not resident(weights))
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    assert resident(checkpoint / "tokenizer.json") == SIZE
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == former
