"""The fetcher against a real HTTP server on loopback that serves a package index, honestly or not."""

import contextlib
import gzip
import hashlib
import json

import httpx
import pytest
from expected import refused

from sparkforge.pins import index
from sparkforge.sources import fetch

DATA = b"a wheel" * 100_000
NAME = "thing-1-py3-none-any.whl"
SHA = hashlib.sha256(DATA).hexdigest()
PAGE = f'<a href="../../files/{NAME}#sha256={SHA}">{NAME}</a>'.encode()
JSON = "application/vnd.pypi.simple.v1+json"
HTML = {"Content-Type": "text/html"}


@pytest.fixture
def server(monkeypatch, serve):
    """A package index: `page` answers requests for the page of `thing`, `behave` requests for the file."""

    def answer(handler):
        if handler.path == f"/files/{NAME}":
            server.file_requests += 1
            return server.behave(handler)
        return server.page(handler) if handler.path == "/simple/thing/" else (404,)

    server = serve(answer)
    server.file_requests, server.behave, server.page = 0, lambda _: (200, DATA), lambda _: (200, PAGE, HTML)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    fetch.sweep.cache_clear()
    return server


def leftovers():
    folder = fetch.cached(NAME, SHA).parent
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_bytes_that_are_wrong_in_the_cache_are_brought_again_and_from_the_index_refused(server):
    path = fetch.fetch("thing", NAME, SHA)
    path.write_bytes(DATA[:-1] + b"X")
    assert fetch.fetch("thing", NAME, SHA).read_bytes() == DATA
    assert server.file_requests == 2
    wrong = DATA[:-1] + b"X"
    server.behave = lambda _: (200, wrong)
    path.unlink()
    with refused("integrity.hash") as caught:
        fetch.fetch("thing", NAME, SHA)
    assert SHA in caught.value.why
    assert hashlib.sha256(wrong).hexdigest() in caught.value.why
    assert leftovers() == []


@pytest.mark.parametrize(("status", "requests"), [(403, 1), (404, 1), (500, index.ATTEMPTS), (429, index.ATTEMPTS)])
def test_an_error_status_is_an_error_and_only_a_busy_server_is_asked_again(server, status, requests):
    server.behave = lambda _: (status, b"no")
    with refused("network.fetch", str(status)):
        fetch.fetch("thing", NAME, SHA)
    assert leftovers() == []
    assert server.file_requests == requests


def test_temporary_failures_are_retried(server, capsys):
    answers, pages = iter([(503,), (200, DATA[:9], {"Content-Length": len(DATA)})]), iter([(429,)])
    server.behave = lambda _: next(answers, (200, DATA))
    server.page = lambda _: next(pages, (200, PAGE, HTML))
    assert fetch.fetch("thing", NAME, SHA).read_bytes() == DATA
    assert server.file_requests == 3
    assert capsys.readouterr().err.count("attempt") == 3


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"x" * 65536)


def test_a_download_stops_at_the_size_of_its_pin(server, monkeypatch):
    server.behave = endless
    with refused("integrity.hash", f"at most {len(DATA)} bytes"):
        fetch.fetch("thing", NAME, SHA, len(DATA))
    server.behave = lambda _: (200, b"", {"Content-Length": len(DATA) + 1})
    with refused("integrity.hash", SHA):
        fetch.fetch("thing", NAME, SHA, len(DATA))
    server.behave = lambda _: (200, b"", {"Content-Length": 1 << 60})
    with refused("storage.full", NAME):
        fetch.fetch("thing", NAME, SHA, 1 << 61)
    server.behave = lambda _: (200, DATA)
    monkeypatch.setattr(fetch, "START_SECONDS", -1e9)
    with refused("network.fetch", "bytes arrived in"):
        fetch.fetch("thing", NAME, SHA, len(DATA))
    assert leftovers() == []


def test_a_download_without_a_pinned_size_stops_at_the_size_in_the_index_or_at_the_largest(server):
    server.behave = endless
    files = [{"filename": NAME, "url": f"/files/{NAME}", "hashes": {"sha256": SHA}, "size": len(DATA)}]
    page = json.dumps({"meta": {"api-version": "1.1"}, "name": "thing", "files": files, "versions": ["1"]}).encode()
    server.page = lambda _: (200, page, {"Content-Type": JSON})
    with refused("integrity.hash", f"at most {len(DATA)} bytes"):
        fetch.fetch("thing", NAME, SHA)
    server.page = lambda _: (200, PAGE, HTML)
    server.behave = lambda _: (200, b"", {"Content-Length": fetch.LARGEST + 1})
    with refused("integrity.hash", f"at most {fetch.LARGEST} bytes"):
        fetch.fetch("thing", NAME, SHA)


MALFORMED = {
    "no JSON": (b"{", JSON),
    "another shape": (b"[1]", JSON),
    "a version to come": (b'{"meta": {"api-version": "99.0"}, "name": "thing", "files": []}', JSON),
    "JSON nested too deep": (b"[" * 200_000, JSON),
    "bytes that are no text": (b"\xff\xfe{", JSON),
    "HTML of a version to come": (b'<meta name="pypi:repository-version" content="99.0">' + PAGE, "text/html"),
    "HTML nested too deep": (b"<div>" * 20_000, "text/html"),
    "a URL that is none": (f'<a href="http://[::1/{NAME}">{NAME}</a>'.encode(), "text/html"),
    "a file of this machine": (f'<a href="file:///etc/{NAME}">{NAME}</a>'.encode(), "text/html"),
    "an unknown character set": (b"x", "text/html; charset=nonsense"),
}


@pytest.mark.parametrize(("body", "kind"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_page_is_an_error_of_ours(server, body, kind):
    server.page = lambda _: (200, body, {"Content-Type": kind})
    with refused("network.fetch"):
        fetch.fetch("thing", NAME, SHA)


def test_a_page_without_end_is_refused_packed_or_not(server):
    server.page = endless
    with refused("network.fetch", "more than"):
        fetch.fetch("thing", NAME, SHA)

    def bomb(handler):
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(gzip.compress(bytes(100 << 20), 1))

    server.page = bomb
    with refused("network.fetch", "more than"):
        fetch.fetch("thing", NAME, SHA)


URLS = ("http://127.0.0.1:x/simple", "http://[::1/simple", "nonsense", "http://a:b:c/")
PROXIES = ("http://127.0.0.1:x", "nonsense://127.0.0.1:1")


@pytest.mark.parametrize(
    ("variable", "value", "code", "reason"),
    [
        *(("PIP_INDEX_URL", url, "network.fetch", "PIP_INDEX_URL") for url in URLS),
        *(("PIP_CERT", file, "storage.access", file) for file in ("/nonexistent", __file__)),
        *(("HTTP_PROXY", proxy, "network.fetch", "proxy") for proxy in PROXIES),
    ],
)
def test_a_setting_of_pip_that_cannot_be_used_is_named(server, monkeypatch, variable, value, code, reason):
    monkeypatch.setenv(variable, value)
    with refused(code, reason):
        fetch.fetch("thing", NAME, SHA)


def test_a_file_name_that_is_a_path_or_not_in_the_index_is_refused(server):
    for name in ("../evil.whl", "/etc/evil.whl", "..", ".", "", "a\0b", "x" * 300):
        with refused("network.fetch", "not a plain file name"):
            fetch.fetch("thing", name, SHA)
    with refused("network.fetch", "lists no such file"):
        fetch.fetch("thing", "thing-2-py3-none-any.whl", SHA)
    with refused("network.fetch", "other-package"):
        fetch.fetch("other-package", NAME, SHA)


def test_the_indexs_password_stays_out_of_the_error(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://anna:hunter2@127.0.0.1:1/simple")
    reply = httpx.Response(401, request=httpx.Request("GET", "http://anna:hunter2@127.0.0.1:1/simple/x/"))
    transport = httpx.MockTransport(lambda _: reply)
    with httpx.Client(transport=transport) as http, refused("network.fetch") as caught:
        index.project_page("x", http)
    assert "401" in caught.value.why
    assert "hunter2" not in str(vars(caught.value))


def test_a_file_of_a_folder_that_pip_looks_into_is_taken_only_with_the_right_hash(server, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", f"https://links.example.org {tmp_path}")
    (tmp_path / NAME).write_bytes(b"another file")
    assert fetch.fetch("thing", NAME, SHA).read_bytes() == DATA
    assert server.file_requests == 1
    fetch.cached(NAME, SHA).unlink()
    (tmp_path / NAME).write_bytes(DATA)
    assert fetch.fetch("thing", NAME, SHA).read_bytes() == DATA
    assert server.file_requests == 1


def test_a_component_with_an_index_of_its_own_comes_from_there_if_pips_has_none(server):
    server.page = lambda _: (200, b"", HTML)
    with refused("network.fetch", "lists no such file"):
        fetch.fetch("thing", NAME, SHA)
    assert fetch.fetch("thing", NAME, SHA, index=f"{server.url}/files").read_bytes() == DATA
    fetch.cached(NAME, SHA).unlink()
    with refused("network.fetch", "PIP_FIND_LINKS"):
        fetch.fetch("thing", NAME, SHA, index=f"{server.url}/nothing")
