"""`python replica.py -m MODULE ARGUMENTS...`: fake_api.py with an API key, in place of one of vLLM's servers.

It says in a header which address it has. A stream of "wait" sends one event, and the last one after a GET of /go.
"""

import http.server
import json
import os
import sys
import threading

import fake_api

from sparkforge.core.vllm_flags import flag_value
from sparkforge.serve import access

GO = threading.Event()


class Replica(fake_api.Api, http.server.BaseHTTPRequestHandler):
    def end_headers(self):
        self.send_header("X-Served-By", self.server.server_address[0])
        super().end_headers()

    def do_GET(self):
        if self.path == "/go":
            GO.set()
        if self.path in ("/go", "/health") or self.has_key():
            super().do_GET()

    def do_POST(self):
        if not self.has_key():
            return
        if self.headers.get("X-Wait"):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"data: first\n\n")
            self.wfile.flush()
            GO.wait(60)
            self.wfile.write(b"data: last\n\n")
            return
        super().do_POST()

    def has_key(self):
        if self.headers.get("Authorization") == f"Bearer {os.environ[access.KEY]}":
            return True
        self._send(401, "application/json", json.dumps({"error": "no key"}))
        return False


host, port = (flag_value(sys.argv, flag) for flag in ("--host", "--port"))
fake_api.Server((host, int(port)), Replica).serve_forever()
