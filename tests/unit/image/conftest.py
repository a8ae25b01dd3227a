"""An image of this checkout in the fake engine."""

import base64
import hashlib
import json

import pytest
from oci_layout import layer

from sparkforge.image import build

PATHS = {name: f"/opt/sparkforge/{name}.json" for name in ("manifest", "audit")}
CLEAN = {"files": 3, "code": {}}


@pytest.fixture
def holding(fake_engine):
    """Return a function that gives the engine's image this checkout's manifest with `changes`, or the bytes `content`.

    Its audit is `report`, and `labels` are its further labels.
    """

    def holding(content=None, report=CLEAN, labels=(), **changes):
        audit = json.dumps(report).encode()
        manifest = {**build.expected("amd64", stack="embedded"), "device": "cpu", "kernels": {}, "key": "k",
                    "audit": {"audit.json": hashlib.sha256(audit).hexdigest()}, **changes}  # fmt: skip
        content = json.dumps(manifest).encode() if content is None else content
        files = {PATHS["manifest"]: content, PATHS["audit"]: audit}
        archives = {path: layer([("some.json", data)], zipped=False) for path, data in files.items()}
        named = {f"org.sparkforge.{name}": path for name, path in PATHS.items()}
        fake_engine.image["Config"]["Labels"] = {**named, **dict(labels)}
        headers = {"X-Docker-Container-Path-Stat": base64.b64encode(b'{"name": "some.json"}').decode()}
        routes = {
            r"POST /containers/create": lambda query: (201, {"Id": "abc", "Warnings": []}),
            r"GET /containers/abc/archive": lambda query: (200, archives[query["path"]], headers),
            r"DELETE /containers/abc": lambda query: (204, b""),
        }
        fake_engine.routes = {**routes, **fake_engine.routes, **routes}  # before the general routes

    return holding
