"""ASGI middleware for test_access.py: writes the routes of vLLM's own application into the file $ROUTES_FILE."""

import json
import os
from pathlib import Path


class ListRoutes:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            write(scope["app"].routes)
        await self.app(scope, receive, send)


def write(routes):
    file = Path(os.environ["ROUTES_FILE"])
    if not file.exists():
        file.write_text(json.dumps([[route.path, sorted(getattr(route, "methods", None) or [])] for route in routes]))
