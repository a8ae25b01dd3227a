"""The fetcher against a real HTTP server on loopback that serves a package index, honestly or not."""

import contextlib
import functools
import hashlib
import http.server
import threading

import pytest

from forge import fetch, index
from forge.pins import Component
from sparkforge.errors import DiskFullError, FetchError, HashMismatchError

DATA = b"a wheel" * 100_000
NAME = "thing-1-py3-none-any.whl"
SHA = hashlib.sha256(DATA).hexdigest()


class Index(http.server.BaseHTTPRequestHandler):
    """`behave` decides what the file's request gets; pages are as a simple index has them."""

    def do_GET(self):
        if self.path == "/simple/thing/":
            self.reply(200, f'<a href="../../files/{NAME}#sha256={SHA}">{NAME}</a>'.encode(), "text/html")
        elif self.path == f"/files/{NAME}":
            self.server.file_requests += 1
            self.server.behave(self)
        else:
            self.reply(404, b"", "text/plain")

    def reply(self, status, body, kind="application/octet-stream", length=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    server.file_requests, server.behave = 0, lambda handler: handler.reply(200, DATA)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    index.pip_config.cache_clear()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
    index.pip_config.cache_clear()


def leftovers():
    folder = fetch.cached(NAME, SHA).parent
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_file_is_brought_once_and_verified_ever_after(server):
    path = fetch.fetch("thing", NAME, SHA)
    assert path.read_bytes() == DATA
    assert fetch.fetch("thing", NAME, SHA) == path
    assert server.file_requests == 1


def test_a_damaged_copy_in_the_cache_is_brought_again(server):
    path = fetch.fetch("thing", NAME, SHA)
    path.write_bytes(DATA[:-1] + b"X")
    assert fetch.fetch("thing", NAME, SHA).read_bytes() == DATA
    assert server.file_requests == 2


def test_wrong_bytes_are_refused_with_both_hashes_and_nothing_is_kept(server):
    wrong = DATA[:-1] + b"X"
    server.behave = lambda handler: handler.reply(200, wrong)
    with pytest.raises(HashMismatchError) as caught:
        fetch.fetch("thing", NAME, SHA)
    assert SHA in caught.value.why
    assert hashlib.sha256(wrong).hexdigest() in caught.value.why
    assert leftovers() == []


def test_a_transfer_that_breaks_off_is_an_error_and_nothing_is_kept(server):
    server.behave = lambda handler: handler.reply(200, DATA[: len(DATA) // 2], length=len(DATA))
    with pytest.raises(FetchError, match="transfer failed"):
        fetch.fetch("thing", NAME, SHA)
    assert leftovers() == []


@pytest.mark.parametrize("status", [403, 404, 500])
def test_an_error_status_is_an_error(server, status):
    server.behave = lambda handler: handler.reply(status, b"no")
    with pytest.raises(FetchError, match=str(status)):
        fetch.fetch("thing", NAME, SHA)
    assert leftovers() == []


def test_a_file_larger_than_the_disk_is_refused_before_it_streams(server):
    server.behave = lambda handler: handler.reply(200, b"", length=1 << 60)
    with pytest.raises(DiskFullError, match=NAME):
        fetch.fetch("thing", NAME, SHA)


def test_an_index_without_the_file_or_the_package_says_so(server):
    with pytest.raises(FetchError, match="lists no such file"):
        fetch.fetch("thing", "thing-2-py3-none-any.whl", SHA)
    with pytest.raises(FetchError, match="other-package"):
        fetch.fetch("other-package", NAME, SHA)


def test_no_network_is_a_named_error_with_the_way_out(server, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    index.pip_config.cache_clear()
    with pytest.raises(FetchError, match="PIP_INDEX_URL"):
        fetch.fetch("thing", NAME, SHA)


def test_an_interrupted_transfer_keeps_nothing(server, monkeypatch):
    def interrupted(size):
        def advance(count):
            raise KeyboardInterrupt

        return contextlib.nullcontext(advance)

    monkeypatch.setattr(fetch, "download_bar", lambda name, size: interrupted(size))
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("thing", NAME, SHA)
    assert leftovers() == []


def test_only_the_files_asked_for_are_brought(server):
    component = Component(
        version="1",
        kind="wheel",
        package="thing",
        licence="MIT",
        why="test",
        files={NAME: SHA, "thing-1-aarch64.whl": "0" * 64},
    )
    bring = functools.partial(fetch.fetch_all, component)
    assert [path.name for path in bring(only="any.whl")] == [NAME]
    with pytest.raises(FetchError):
        bring()
