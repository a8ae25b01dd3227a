"""Two machines of a cluster as network namespaces, each with an sshd, and a veth pair as the cable.

The machines share processes and clock; each has its own state folder. Programs that an sshd starts see their own file
system view, in which `mounted` replaces a folder, and search for programs in the machine's own folder first.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from programs import write_program
from waiting import wait_for

from sparkforge.core.paths import ROOT
from sparkforge.serve.cluster import start

PROGRAMS = ("ip", "nsenter", "ssh", "ssh-keygen", "sshd")  # for `pytest.mark.needs`
ADDRESSES = HEAD, WORKER = ("10.77.0.1", "10.77.0.2")
NAMES = ("head", "worker")
CABLES = ("cable0", "cable1")  # the ends that have these addresses


def ip(*arguments, check=True):
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)  # noqa: S607


@dataclass
class Nodes:
    """The namespaces' names (empty: this machine's own network), and a folder with programs and files for all.

    `variables` are set for a login on each machine, in addition to those of the tests.
    """

    spaces: tuple[str, ...]
    work: Path
    variables: tuple[dict, ...] = ({}, {})
    servers: list[subprocess.Popen] = field(default_factory=list)  # each one's sshd

    @property
    def ours(self):
        return self.work / "bin"

    @property
    def theirs(self):
        return self.work / "bin2"

    @property
    def environment(self):
        return {
            **os.environ, "PATH": f"{self.ours}:{os.environ['PATH']}", "SPARKFORGE_STATE": str(self.folder(0)),
            **self.variables[0],
        }  # fmt: skip

    def inside(self, index, *argv):
        return [*(["ip", "netns", "exec", self.spaces[index]] if self.spaces[index] else []), *argv]

    def ip(self, index, *arguments):
        ip(*(["-n", self.spaces[index]] if self.spaces[index] else []), *arguments)

    def folder(self, index):
        """The state folder of a machine."""
        return self.work / "ab"[index]

    def inv(self, *arguments, seconds=120):
        command = self.inside(0, sys.executable, "-m", "invoke", *arguments)
        result = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=seconds
        )
        assert "Traceback" not in result.stderr, result.stderr
        return result

    def config(
        self, *, device="embedded", ssh=("", f"root@{WORKER}"), addresses=ADDRESSES,
        interfaces=CABLES, python=sys.executable, **settings,
    ):  # fmt: skip
        lines = ["schema = 1", f'device = "{device}"', *(f"{name} = {value}" for name, value in settings.items())]
        for index, (_, name) in enumerate(zip(self.spaces, NAMES, strict=False)):
            state = self.folder(index)
            lines += ["[[nodes]]", f'name = "{name}"', f'ssh = "{ssh[index]}"', f'address = "{addresses[index]}"']
            lines += [f'interface = "{interfaces[index]}"', f'folder = "{self.work}"', f'state = "{state}"']
            lines += [f'python = "{python}"']
        file = self.work / "cluster.toml"
        file.write_text("\n".join(lines) + "\n")
        return file

    def status(self, file):
        """Return the exit code and the document of cluster.status."""
        result = self.inv("cluster.status", "--config", str(file), "--json")
        return result.returncode, json.loads(result.stdout)

    def link(self, index, *arguments):
        self.ip(index, "link", "set", CABLES[index], *arguments)

    @contextlib.contextmanager
    def mounted(self, folder, target, index=1):
        """Return a context manager in which commands over ssh see one folder in place of another."""
        view = ["nsenter", "--target", str(self.servers[index].pid), "--mount"]
        subprocess.run([*view, "mount", "--bind", str(folder), str(target)], check=True)
        try:
            yield
        finally:
            subprocess.run([*view, "umount", str(target)], check=True)


def start_sshds(nodes):
    """Start an sshd in each namespace, for a key made for this test, and write a client that knows both."""
    keys = nodes.work / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)  # noqa: S607
    shutil.copy(keys / "user.pub", keys / "authorized")
    (keys / "known").write_text(f"{','.join(ADDRESSES)} {(keys / 'host.pub').read_text()}")
    (keys / "ssh").write_text(f"Host *\n  IdentityFile {keys / 'user'}\n  UserKnownHostsFile {keys / 'known'}\n")
    write_program(nodes.work / start.INTERPRETER, f'exec {sys.executable} "$@"')  # of the other machines' checkout
    Path("/run/sshd").mkdir(exist_ok=True)
    for index, _ in enumerate(nodes.spaces):
        programs = (nodes.ours, nodes.theirs)[index]
        programs.mkdir()
        settings = keys / f"sshd{index}"
        variables = {"PYTHONPATH": ROOT, **nodes.variables[index]}
        settings.write_text(
            f"ListenAddress {ADDRESSES[index]}\nHostKey {keys / 'host'}\nAuthorizedKeysFile {keys / 'authorized'}\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nPidFile none\nPermitRootLogin yes\n"
            f"StrictModes no\nSetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
            # The user's shell may set PATH, so it is set after that.
            f'ForceCommand PATH={programs}:{os.environ["PATH"]} exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        command = nodes.inside(index, shutil.which("sshd"), "-D", "-e", "-f", str(settings))
        with (keys / f"log{index}").open("w") as log:
            nodes.servers.append(subprocess.Popen(command, stderr=log, stdout=log))
    client = nodes.ours / "ssh"  # OpenSSH finds its configuration by the user database, not by HOME
    write_program(client, f'exec {shutil.which("ssh")} -F {keys / "ssh"} "$@"')
    for index, address in enumerate(ADDRESSES):
        probe = nodes.inside(0, str(client), "-o", "BatchMode=yes", f"root@{address}", "true")
        log = (keys / f"log{index}").read_text
        wait_for(
            lambda probe=probe: not subprocess.run(probe, capture_output=True, check=False).returncode, 20, log, 0.05
        )


def made(work, own=False, variables=({}, {})):
    """Make the namespaces, yield them, and remove them. Without privileges the test is skipped, or fails on CI.

    With `own` the first machine has no namespace but is this machine, with the cable in its own network.
    """
    spaces = tuple("" if own and letter == "a" else f"sf{os.getpid()}{letter}" for letter in "ab")
    nodes = Nodes(spaces, work, variables)
    try:
        try:
            for space in filter(None, spaces):
                ip("netns", "add", space)
        except (OSError, subprocess.CalledProcessError) as error:
            why = f"no network namespace can be made: {getattr(error, 'stderr', error)}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
        peer = ("peer", "name", CABLES[1], "netns", spaces[1])
        nodes.ip(0, "link", "add", CABLES[0], "type", "veth", *peer)
        for index, _ in enumerate(spaces):
            nodes.ip(index, "link", "set", "lo", "up")
            nodes.ip(index, "addr", "add", f"{ADDRESSES[index]}/24", "dev", CABLES[index])
            nodes.link(index, "up", "mtu", "9000")
        start_sshds(nodes)
        yield nodes
    finally:
        for server in nodes.servers:
            server.terminate()
            server.wait(20)
        if own:
            ip("link", "del", CABLES[0], check=False)
        for space in filter(None, spaces):
            ip("netns", "del", space, check=False)
