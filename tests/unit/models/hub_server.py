"""The routes of the Hugging Face hub that a download uses, on loopback: commit and files, and resolve with ranges."""

import hashlib
import json
import re
import time
from contextlib import ExitStack, suppress

from loopback import Quiet, serving

from sparkforge.models import recipes as models

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shard(name, size, seed):
    header = json.dumps({name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + hashlib.shake_256(seed).digest(size)


def checkpoint(size=300_000):
    """Return a gpt-oss repository's files by name, including copies that vLLM does not read."""
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    config = models.load()["gpt-oss-120b"].config
    return {
        "config.json": json.dumps(config).encode(), "generation_config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}', "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}", "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00002.safetensors": shard("a", size, b"a"),
        "model-00002-of-00002.safetensors": shard("b", size, b"b"), "README.md": b"words",
        "original/model.safetensors": b"x" * 1000, "metal/model.bin": b"y" * 1000,
    }  # fmt: skip


class HubServer:
    """Serves `files` as openai/gpt-oss-120b; its fields make it slow, broken or strict."""

    def __init__(self, files):
        self.files = files
        self.listed = dict(files)  # the files in the metadata; a corrupted file differs from them
        self.token = ""
        self.repository, self.commit = "openai/gpt-oss-120b", COMMIT
        self.delay = 0.0  # seconds between two pieces of 16 KiB
        self.asked = []
        self.stack = ExitStack()
        self.url = self.stack.enter_context(serving(Handler, hub=self)).url

    def siblings(self):
        for name, data in self.listed.items():
            entry = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()
            if name.endswith((".safetensors", "tokenizer.json")):
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 135}
            yield entry

    def downloads(self):
        return [(name, begin) for kind, name, begin in self.asked if kind == "resolve"]

    def close(self):
        self.stack.close()


class Handler(Quiet):
    protocol_version = "HTTP/1.1"

    def get(self):
        hub = self.server.hub
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.reply(401, {"error": "no"}, {"X-Error-Code": "GatedRepo", "X-Error-Message": "no"})
        if match := re.fullmatch(rf"/api/models/{hub.repository}/revision/(\w+)(?:\?.*)?", self.path):
            if match[1] not in {"main", COMMIT}:
                return self.reply(404, {}, {"X-Error-Code": "RevisionNotFound"})
            hub.asked.append(("info", match[1], 0))
            return self.reply(200, {"id": hub.repository, "sha": hub.commit, "siblings": list(hub.siblings())})
        if match := re.fullmatch(rf"/{hub.repository}/resolve/{COMMIT}/(.+)", self.path):
            return self.resolve(match[1])
        return self.reply(404, {}, {"X-Error-Code": "RepoNotFound"})

    def resolve(self, name):
        hub, begin = self.server.hub, 0
        data = hub.files[name]
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            begin = int(asked[1])
        hub.asked.append(("resolve", name, begin))
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.send_response(206 if begin else 200)
        for header, value in {"Content-Length": str(len(data) - begin), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        with suppress(OSError):
            for offset in range(begin, len(data), 16384):
                self.wfile.write(data[offset : offset + 16384])
                time.sleep(hub.delay)
