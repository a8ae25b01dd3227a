"""Two machines of a cluster as network namespaces: a veth pair as the cable, an sshd in the second one.

They share the file system, the processes and the clock; each has a state folder of its own.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge.core.paths import ROOT
from sparkforge.serve.cluster import start

IP, KEYGEN = (shutil.which(name) or name for name in ("ip", "ssh-keygen"))
HEAD, WORKER = "10.77.0.1", "10.77.0.2"
CABLES = ("cable0", "cable1")  # the ends, in the first and the second namespace


def ip(*words):
    subprocess.run([IP, *words], check=True, capture_output=True, text=True)


@dataclass
class Nodes:
    """The namespaces' names, and a folder with the programs and files that both use."""

    spaces: tuple[str, str]
    work: Path

    @property
    def environment(self):
        return {
            **os.environ,
            "PATH": f"{self.work / 'bin'}:{os.environ['PATH']}",
            "SPARKFORGE_STATE": str(self.work / "a"),
        }

    def inside(self, index, *words):
        return [IP, "netns", "exec", self.spaces[index], *words]

    def inv(self, *words, seconds=120):
        command = self.inside(0, sys.executable, "-m", "invoke", *words)
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=seconds
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def config(self, **settings):
        lines = ["schema = 1", 'device = "embedded"', *(f"{name} = {value}" for name, value in settings.items())]
        for index, (name, address) in enumerate((("head", HEAD), ("worker", WORKER))):
            ssh, state = ("", self.work / "a") if index == 0 else (f"root@{WORKER}", self.work / "b")
            lines += ["[[nodes]]", f'name = "{name}"', f'ssh = "{ssh}"', f'address = "{address}"']
            lines += [f'interface = "{CABLES[index]}"', f'folder = "{self.work}"', f'state = "{state}"']
            lines += [f'python = "{sys.executable}"']
        file = self.work / "cluster.toml"
        file.write_text("\n".join(lines) + "\n")
        return file

    def link(self, index, *words):
        ip("-n", self.spaces[index], "link", "set", CABLES[index], *words)


def start_sshd(nodes):
    """Start an sshd in the second namespace, for a key made for this test, and a client that knows it; return it."""
    keys = nodes.work / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run([KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    shutil.copy(keys / "user.pub", keys / "authorized")
    (keys / "known").write_text(f"{WORKER} {(keys / 'host.pub').read_text()}")
    (keys / "sshd").write_text(
        f"ListenAddress {WORKER}\nHostKey {keys / 'host'}\nAuthorizedKeysFile {keys / 'authorized'}\nStrictModes no\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nPidFile none\nPermitRootLogin yes\n"
        f"SetEnv PATH={os.environ['PATH']} PYTHONPATH={ROOT}\n"
    )
    (keys / "ssh").write_text(f"Host *\n  IdentityFile {keys / 'user'}\n  UserKnownHostsFile {keys / 'known'}\n")
    programs = nodes.work / "bin"
    programs.mkdir()
    interpreter = nodes.work / start.INTERPRETER  # of the other machine's checkout
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    client = programs / "ssh"  # OpenSSH finds its configuration by the user's record, not by HOME
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys / "ssh"} "$@"\n')
    client.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    command = nodes.inside(1, shutil.which("sshd"), "-D", "-e", "-f", str(keys / "sshd"))
    with (keys / "log").open("w") as log:
        server = subprocess.Popen(command, stderr=log, stdout=log)
    probe = nodes.inside(0, str(client), "-o", "BatchMode=yes", f"root@{WORKER}", "true")
    deadline = time.monotonic() + 20
    while subprocess.run(probe, capture_output=True, check=False).returncode:
        assert server.poll() is None, (keys / "log").read_text()
        assert time.monotonic() < deadline, (keys / "log").read_text()
        time.sleep(0.05)
    return server


def made(work):
    """Make both namespaces, yield them, and remove them. Without privileges the test is skipped, and fails on CI."""
    spaces = tuple(f"sf{os.getpid()}{letter}" for letter in "ab")
    nodes, server = Nodes(spaces, work), None
    try:
        try:
            ip("netns", "add", spaces[0])
        except (OSError, subprocess.CalledProcessError) as error:
            why = f"no network namespace can be made: {getattr(error, 'stderr', error)}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
        ip("netns", "add", spaces[1])
        ip("link", "add", CABLES[0], "netns", spaces[0], "type", "veth", "peer", "name", CABLES[1], "netns", spaces[1])
        for index, address in enumerate((HEAD, WORKER)):
            ip("-n", spaces[index], "link", "set", "lo", "up")
            ip("-n", spaces[index], "addr", "add", f"{address}/24", "dev", CABLES[index])
            nodes.link(index, "up", "mtu", "9000")
        server = start_sshd(nodes)
        yield nodes
    finally:
        if server:
            server.terminate()
            server.wait(20)
        for space in spaces:
            subprocess.run([IP, "netns", "del", space], check=False, capture_output=True)
