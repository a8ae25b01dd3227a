"""Machines of a cluster as network namespaces, each with an sshd: two with a veth pair as the cable, or three.

Three are connected by a switch, and each two of them by a cable of their own. They share the processes and the clock;
each has a state folder of its own. What an sshd starts has a view of the file system of its own: `mounted` changes a
folder in one, which looks for programs in its own folder first.
"""

import collections
import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sparkforge.core.paths import ROOT
from sparkforge.serve.cluster import start

IP, KEYGEN = (shutil.which(name) or name for name in ("ip", "ssh-keygen"))
NSENTER = shutil.which("nsenter") or "nsenter"
ADDRESSES = HEAD, WORKER, THIRD = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
NAMES = ("head", "worker", "third")
CABLES = ("cable0", "cable1", "cable2")  # the ends that have these addresses
SLOW = ("slow0", "slow1")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000  # linux/if_tun.h


def ip(*arguments):
    subprocess.run([IP, *arguments], check=True, capture_output=True, text=True)


@dataclass
class Nodes:
    """The namespaces' names (empty: this machine's own network), and a folder with programs and files for all.

    `variables` are what a login on each has, beside those of the tests.
    """

    spaces: tuple[str, ...]
    work: Path
    variables: tuple[dict, ...] = ({}, {}, {})
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
            **os.environ,
            "PATH": f"{self.ours}:{os.environ['PATH']}",
            "SPARKFORGE_STATE": str(self.folder(0)),
            **self.variables[0],
        }

    def inside(self, index, *argv):
        return [*([IP, "netns", "exec", self.spaces[index]] if self.spaces[index] else []), *argv]

    def ip(self, index, *arguments):
        ip(*(["-n", self.spaces[index]] if self.spaces[index] else []), *arguments)

    def folder(self, index):
        """The state folder of a machine."""
        return self.work / "abc"[index]

    def inv(self, *arguments, seconds=120):
        command = self.inside(0, sys.executable, "-m", "invoke", *arguments)
        result = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=seconds
        )
        assert "Traceback" not in result.stderr, result.stderr
        return result

    def config(
        self, *, device="embedded", ssh=("", f"root@{WORKER}", f"root@{THIRD}"), addresses=ADDRESSES,
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

    def link(self, index, *arguments):
        self.ip(index, "link", "set", CABLES[index], *arguments)

    @contextlib.contextmanager
    def mounted(self, folder, target, index=1):
        """While inside, a machine that is asked over ssh sees a folder in another one's place."""
        view = [NSENTER, "--target", str(self.servers[index].pid), "--mount"]
        subprocess.run([*view, "mount", "--bind", str(folder), str(target)], check=True)
        try:
            yield
        finally:
            subprocess.run([*view, "umount", str(target)], check=True)

    @contextlib.contextmanager
    def program(self, folder, name, script):
        """While inside, a machine has a stand-in of this name for a program."""
        file = folder / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        try:
            yield
        finally:
            file.unlink()

    @contextlib.contextmanager
    def slow_link(self, seconds):
        """While inside, a second network, 10.78.0.0/24, connects both; each frame comes through after `seconds`.

        A program carries the frames from one tap device to the other: not every kernel has netem.
        """
        with contextlib.ExitStack() as stack:
            taps = []
            for index, name in enumerate(SLOW):
                tap = os.open("/dev/net/tun", os.O_RDWR)
                stack.callback(os.close, tap)  # the device goes with it
                first = self.spaces[index]  # nobody else's name while the device is not in its namespace yet
                fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", first.encode(), IFF_TAP | IFF_NO_PI))
                ip("link", "set", first, "netns", self.spaces[index], "name", name)
                ip("-n", self.spaces[index], "addr", "add", f"10.78.0.{index + 1}/24", "dev", name)
                ip("-n", self.spaces[index], "link", "set", name, "up")
                taps.append(tap)
            over = threading.Event()
            carrier = threading.Thread(target=carry, args=(taps, seconds, over))
            carrier.start()
            stack.callback(carrier.join)
            stack.callback(over.set)
            yield


def carry(taps, seconds, over):
    """Write each frame of one tap device to the other one after `seconds`."""
    waiting = collections.deque()
    while not over.is_set():
        for tap in select.select(taps, [], [], 0.001 if waiting else 0.05)[0]:
            waiting.append((time.monotonic() + seconds, taps[1 - taps.index(tap)], os.read(tap, 1 << 14)))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(*waiting.popleft()[1:])


def start_sshds(nodes):
    """Start an sshd in each namespace, for a key made for this test, and write a client that knows both."""
    keys = nodes.work / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run([KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    shutil.copy(keys / "user.pub", keys / "authorized")
    (keys / "known").write_text(f"{','.join(ADDRESSES)} {(keys / 'host.pub').read_text()}")
    (keys / "ssh").write_text(f"Host *\n  IdentityFile {keys / 'user'}\n  UserKnownHostsFile {keys / 'known'}\n")
    interpreter = nodes.work / start.INTERPRETER  # of the other machines' checkout
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    for index, _ in enumerate(nodes.spaces):
        programs = (nodes.ours, nodes.theirs, nodes.work / "bin3")[index]
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
    client = nodes.ours / "ssh"  # OpenSSH finds its configuration by the user's record, not by HOME
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys / "ssh"} "$@"\n')
    client.chmod(0o755)
    deadline = time.monotonic() + 20
    for index, (server, address) in enumerate(zip(nodes.servers, ADDRESSES, strict=False)):
        probe = nodes.inside(0, str(client), "-o", "BatchMode=yes", f"root@{address}", "true")
        while subprocess.run(probe, capture_output=True, check=False).returncode:
            log = (keys / f"log{index}").read_text()
            assert server.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.05)


def made(work, count=2, own=False, variables=({}, {}, {})):
    """Make the namespaces, yield them, and remove them. Without privileges the test is skipped, and fails on CI.

    With `own` the first machine has no namespace: it is this one, with the cable in its own network.
    """
    spaces = tuple("" if own and letter == "a" else f"sf{os.getpid()}{letter}" for letter in "abc"[:count])
    nodes = Nodes(spaces, work, variables)
    switch = f"sf{os.getpid()}s"
    try:
        try:
            for space in (*filter(None, spaces), *([switch] if count > 2 else [])):
                ip("netns", "add", space)
        except (OSError, subprocess.CalledProcessError) as error:
            why = f"no network namespace can be made: {getattr(error, 'stderr', error)}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
        (cable if count == 2 else at_a_switch)(nodes, switch)
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
            subprocess.run([IP, "link", "del", CABLES[0]], check=False, capture_output=True)
        for space in filter(None, (*spaces, switch)):
            subprocess.run([IP, "netns", "del", space], check=False, capture_output=True)


def cable(nodes, _switch):
    """Connect two namespaces directly."""
    peer = ("peer", "name", CABLES[1], "netns", nodes.spaces[1])
    nodes.ip(0, "link", "add", CABLES[0], "type", "veth", *peer)


def at_a_switch(nodes, switch):
    """Connect all namespaces by a bridge."""
    ip("-n", switch, "link", "add", "switch", "mtu", "9000", "type", "bridge")
    ip("-n", switch, "link", "set", "switch", "up")
    for index, _ in enumerate(nodes.spaces):
        nodes.ip(index, "link", "add", CABLES[index], "type", "veth", "peer", "name", f"port{index}", "netns", switch)
        ip("-n", switch, "link", "set", f"port{index}", "mtu", "9000", "master", "switch", "up")
