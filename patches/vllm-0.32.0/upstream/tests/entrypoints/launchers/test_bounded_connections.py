# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A connection without a request is closed, and an upgrade that nobody serves is
answered."""

import asyncio
import socket

import pytest
from fastapi import FastAPI, WebSocket

from vllm.entrypoints.launchers.launcher import serve_http

GET = b"GET /x HTTP/1.1\r\nHost: x\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"


async def served(app, ask):
    """Serve *app* on loopback, and return what *ask* returns for its port."""
    app.state.engine_client = None
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        server = asyncio.create_task(
            serve_http(app, sock, host="127.0.0.1", port=port, lifespan="off")
        )
        try:
            return await asyncio.wait_for(ask(port), 20)
        finally:
            app.state.server.should_exit = True
            await server


def answers(app, *pieces):
    """Return what the server sends until it closes the connection."""

    async def ask(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
        answer = await reader.read()
        writer.close()
        return answer

    return asyncio.run(served(app, ask))


@pytest.fixture
def app(monkeypatch):
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_HEADERS", "0.5")
    app = FastAPI()
    app.add_api_route("/x", lambda: "ok", methods=["GET", "POST"])
    return app


def test_a_client_that_sends_nothing(app):
    assert answers(app) == b""


@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "kept alive"])
def test_headers_that_never_end(app, before):
    answer = answers(app, before, GET, *[b"X"] * 4)
    assert answer.count(b"HTTP/1.1 200 ") == bool(before)
    assert b"HTTP/1.1 408 " in answer


def test_a_request_that_takes_longer_than_its_headers_may(app):
    async def slow():
        await asyncio.sleep(1)
        return "done"

    app.add_api_route("/slow", slow)
    answer = answers(app, GET.replace(b"/x", b"/slow") + b"Connection: close\r\n\r\n")
    assert b"done" in answer


@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_an_upgrade_is_answered(app, method):
    body = b"Content-Length: 2\r\n\r\n{}" if method == b"POST" else b"\r\n"
    answer = answers(app, GET.replace(b"GET", method) + UPGRADE + body)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_websocket_route_is_served(app):
    async def hello(websocket: WebSocket):
        await websocket.accept()
        await websocket.close()

    app.add_api_websocket_route("/ws", hello)
    key = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    answer = answers(app, GET.replace(b"/x", b"/ws") + UPGRADE + key + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 101 ")
