"""Unpack source archives: a tar and a zip, into new folders."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from base64 import urlsafe_b64encode

from robustness.scenario import Scenario, write
from sparkforge.core import manifest
from sparkforge.sources import archive

FILES = {"setup.py": b"setup()\n", "src/a.c": b"int a;\n" * 40_000, "src/deep/er/b.h": b"", "run": b"#!/bin/sh\n"}


def tar(top, files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as out:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{top}/{name}" if top else name)
            info.size, info.mode = len(content), 0o755 if name == "run" else 0o644
            out.addfile(info, io.BytesIO(content))
    return gzip.compress(data.getvalue(), mtime=0)


def zipped(files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in files.items():
            out.writestr(zipfile.ZipInfo(name), content)
    return data.getvalue()


def wheel(info, files):
    """Return a wheel of the files, with the RECORD in its folder `info`."""
    hashes = {
        path: urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=") for path, data in files.items()
    }
    rows = [f"{path},sha256={hashes[path]},{len(data)}\n" for path, data in files.items()]
    return zipped({**files, f"{info}/RECORD": "".join([*rows, f"{info}/RECORD,,\n"]).encode()})


def _prepare(work):
    write(work / "up-1.tar.gz", tar("up-1", FILES))
    write(work / "up-1.whl", zipped(FILES))
    write(work / "place/mine/mine.txt", "mine")


def _act(work):
    """Do as every stage: first remove the files of a killed run, and rename the result last."""
    for name, top in (("up-1.tar.gz", "up-1"), ("up-1.whl", None)):
        target = work / "place" / name.rpartition(".")[2]
        manifest.remove(target)
        archive.unpack(work / name, target, top=top)


def _healed(work):
    for name in ("gz", "whl"):
        for path, content in FILES.items():
            assert (work / "place" / name / path).read_bytes() == content


SCENARIOS = [Scenario("unpack", _prepare, _act, healed=_healed, races=())]  # a stage holds a lock around it
