"""OCI layouts for tests, honest and hostile, without an engine."""

import gzip
import hashlib
import io
import json
import tarfile


def layer(entries, *, zipped=True):
    """Return a layer: (name, bytes), or a TarInfo, for each entry."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            info.size = len(entry[1])
            tar.addfile(info, io.BytesIO(entry[1]))
    return gzip.compress(data.getvalue(), mtime=0) if zipped else data.getvalue()


class Writer:
    """Writes an OCI layout in a folder."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def put(self, data, kind="application/octet-stream"):
        """Write a blob; return its descriptor."""
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    def image(self, layers, labels, **settings):
        """Write an image and name it in index.json; return the descriptor of its manifest."""
        settings = {"os": "linux", "architecture": "amd64", "created": "2026-11-01T00:00:00Z", **settings}
        config = self.put({**settings, "config": {"Labels": labels}}, "application/vnd.oci.image.config.v1+json")
        blobs = [self.put(data, "application/vnd.oci.image.layer.v1.tar+gzip") for data in layers]
        kind = "application/vnd.oci.image.manifest.v1+json"
        manifest = self.put({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": blobs}, kind)
        self.index([manifest])
        return manifest

    def index(self, manifests):
        """Write index.json."""
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))


FOLDER = "opt/sparkforge"
LABELS = {f"org.sparkforge.{name}": f"/{FOLDER}/{name}.json" for name in ("manifest", "audit", "sbom", "source")}


def ours(writer, expected, stack="embedded", **more):
    """Write an image with this checkout's metadata; `components` are names in its bill. Return its descriptor."""
    names = more.pop("components", ["vllm"])
    components = [{"name": name, "version": "1", "purl": f"pkg:pypi/{name}@1"} for name in names]
    bill = json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "components": components}).encode()
    audit = json.dumps({"files": 1, "code": {}}).encode()
    manifest = {
        "stack": stack, "kernels": {}, "key": "k", **{key: dict(value) for key, value in expected.items()},
        "audit": {"audit.json": hashlib.sha256(audit).hexdigest()},
        "sbom": {"sbom.json": hashlib.sha256(bill).hexdigest()},
    }  # fmt: skip
    source = json.dumps({"revision": "a" * 40, "from": "git", "tree": "b" * 64}).encode()
    contents = {"manifest": json.dumps(manifest).encode(), "audit": audit, "sbom": bill, "source": source}
    entries = [(f"{FOLDER}/{name}.json", data) for name, data in contents.items()]
    return writer.image([layer(entries), *more.pop("layers", [])], {**LABELS, "org.sparkforge.stack": stack}, **more)
