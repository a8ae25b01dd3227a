"""HTTP servers on the loopback."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    """A handler that logs nothing; its `get` and `post` answer."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.get()

    def do_POST(self):
        self.post()

    def body(self):
        """Read the request's body."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status, body=b"", headers=()):
        """Send a complete answer: bytes, or a value as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if isinstance(body, bytes) else {"Content-Type": "application/json"}
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **kind, **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(data)

    def stream(self, headers=()):
        """Begin an answer without a length, which ends with the connection."""
        self.send_response(200)
        for name, value in {"Content-Type": "text/event-stream", **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serving(handler, **fields):
    """Serve in a thread; yield the server, which has `url` and the given fields, for handlers in `self.server`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads, server.url = True, f"http://127.0.0.1:{server.server_port}"
        vars(server).update(fields)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
