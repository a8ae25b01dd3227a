"""A server on loopback, in a separate process, because the runner forks and must not have threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""

    def answer(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide errors about killed clients
        try:
            server.serve_forever()
        finally:
            os._exit(0)
    host, port = server.server_address[:2]
    server.socket.close()
    try:
        yield f"http://{host!s}:{port}"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
