"""A fake Docker engine for tests of messages and flow: a real HTTP server on a unix socket with recorded answers.

`recorded/*-docker-26.1.5.json` are answers of a real engine of that version, shortened. Tests change single fields.
"""

import json
import re
import socketserver
import struct
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from loopback import Quiet

RECORDED = Path(__file__).parent / "recorded"


def recorded(name):
    return json.loads((RECORDED / f"{name}-docker-26.1.5.json").read_text())


class FakeEngine:
    """Answers by `routes`: "METHOD pattern of the path" → function of the query that gives status, body, headers."""

    def __init__(self, socket):
        self.socket, self.asked = socket, []
        self.info, self.image, self.container = recorded("info"), recorded("image"), recorded("container")
        self.log = ""
        self.routes = {
            r"GET /version": lambda query: (200, recorded("version")),
            r"GET /info": lambda query: (200, self.info),
            r"GET /images/.+/json": lambda query: (200, self.image),
            r"GET /images/.+/history": lambda query: (200, []),
            r"GET /containers/json": lambda query: (200, [{"Id": "c0ffee" * 10, "Created": 1}]),
            r"GET /containers/\w+/json": lambda query: (200, {"Id": "c0ffee" * 10, **self.container}),
            r"GET /containers/\w+/logs": lambda query: (200, self.frames()),
        }
        handler = type("Handler", (Handler,), {"engine": self})
        self.server = Server(str(socket), handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def frames(self):
        """Return a log in the API's multiplexed form: stream, three zeros, length, bytes."""
        data = self.log.encode()
        return struct.pack(">BxxxL", 1, len(data)) + data

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class Handler(Quiet):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.body()
        parts = urlsplit(self.path)
        called = f"{self.command} {re.sub(r'^/v[0-9.]+', '', parts.path)}"
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.engine.asked.append((called, query))
        handler = next((route for pattern, route in self.engine.routes.items() if re.fullmatch(pattern, called)), None)
        answer = handler(query) if handler else (404, {"message": f"page not found: {called}"})
        status, body, headers = (*answer, {})[:3]
        kind = {"Content-Type": "application/octet-stream"} if isinstance(body, bytes) else {}
        self.reply(status, body, {**kind, **headers})

    do_GET = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 (http.server's names)

    def address_string(self):
        return "unix"
