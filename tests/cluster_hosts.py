"""Two hosts as network namespaces, each with its own /etc, /var/lib and home, and a cable without addresses.

A second cable is the network by which they are reached.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import cluster_nodes as namespaces
import pytest

from sparkforge.core.paths import ROOT

MANAGEMENT, LINKS = ("10.78.0.1", "10.78.0.2"), ("link0", "link1")
ENTER = 'mount --bind "$0/etc" /etc && mount --bind "$0/lib" /var/lib && exec "$@"'


@dataclass
class Host:
    """A namespace, its files, and a PATH of its own in front of this machine's."""

    space: str
    files: Path
    environment: dict = field(default_factory=dict)

    @property
    def etc(self):
        return self.files / "etc"

    @property
    def home(self):
        return self.files / "home"

    @property
    def programs(self):
        return self.files / "bin"

    def command(self, *argv):
        shell = [shutil.which("unshare"), "--mount", "/bin/sh", "-c", ENTER, str(self.files)]
        return [namespaces.IP, "netns", "exec", self.space, *shell, *argv]

    def run(self, *argv, seconds=60):
        command = self.command(*argv)
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=seconds
        )

    def inv(self, *arguments, seconds=120):
        result = self.run(sys.executable, "-m", "invoke", *arguments, seconds=seconds)
        assert "Traceback" not in result.stderr, result.stderr
        return result

    def stand_in(self, name, text):
        file = self.programs / name
        file.write_text(text)
        file.chmod(0o755)
        return file


def files_of(work, name):
    """Make a host's files: a small /etc in which root's home is a folder of ours."""
    files = work / name
    for folder in ("etc/ssh", "lib", "home/.ssh", "bin", "state"):
        (files / folder).mkdir(parents=True)
    for copied in (
        "group",
        "nsswitch.conf",
        "ld.so.cache",
        "ld.so.conf",
        "shadow",
        "pam.d",
        "alternatives",
        "machine-id",
    ):
        source = Path("/etc", copied)
        if source.is_dir():
            shutil.copytree(source, files / "etc" / copied, symlinks=True)
        elif source.exists():
            shutil.copy(source, files / "etc" / copied)
    accounts = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    lines = [":".join([*a[:5], str(files / "home"), *a[6:]] if a[0] == "root" else a) for a in accounts]
    (files / "etc/passwd").write_text("\n".join(lines) + "\n")
    return files


def running_hosts(work):
    """Yield both hosts, the first one with an ssh client that the second one's sshd lets in."""
    hosts, server = [], None
    try:
        for letter in "ab":
            space = f"sfh{os.getpid()}{letter}"
            try:
                namespaces.ip("netns", "add", space)
            except (OSError, subprocess.CalledProcessError) as error:
                why = f"no network namespace can be made: {getattr(error, 'stderr', error)}"
                (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
            files = files_of(work, letter)
            path = f"{files / 'bin'}:{os.environ['PATH']}"
            hosts.append(Host(space, files, {**os.environ, "PATH": path, "SPARKFORGE_STATE": str(files / "state")}))
        spaces = [host.space for host in hosts]
        for ends in (("mgmt0", "mgmt1"), LINKS):
            ends_of = ("netns", spaces[0], "type", "veth", "peer", "name", ends[1], "netns", spaces[1])
            namespaces.ip("link", "add", ends[0], *ends_of)
            for space, end in zip(spaces, ends, strict=True):
                namespaces.ip("-n", space, "link", "set", end, "up")
        for space, address, end in zip(spaces, MANAGEMENT, ("mgmt0", "mgmt1"), strict=True):
            namespaces.ip("-n", space, "link", "set", "lo", "up")
            namespaces.ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
        server = start_sshd(*hosts)
        yield hosts
    finally:
        if server:
            server.terminate()
            server.wait(20)
        for host in hosts:
            subprocess.run([namespaces.IP, "netns", "del", host.space], check=False, capture_output=True)


def start_sshd(head, worker):
    """Start the second host's sshd on all its addresses, with a key that the first one's user has."""
    keygen = [namespaces.KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f"]
    for file in (worker.etc / "ssh/ssh_host_ed25519_key", head.home / ".ssh/id_ed25519"):
        subprocess.run([*keygen, file], check=True)
    shutil.copy(head.home / ".ssh/id_ed25519.pub", worker.home / ".ssh/authorized_keys")
    host_key = (worker.etc / "ssh/ssh_host_ed25519_key.pub").read_text()
    (head.home / ".ssh/known_hosts").write_text(f"{MANAGEMENT[1]} {host_key}")
    for folder in (head.home / ".ssh", worker.home / ".ssh", worker.home):
        folder.chmod(0o700)
    (worker.etc / "ssh/sshd_config").write_text(
        "HostKey /etc/ssh/ssh_host_ed25519_key\nStrictModes no\nPasswordAuthentication no\nPidFile none\n"
        f"KbdInteractiveAuthentication no\nPermitRootLogin yes\nSetEnv PATH={worker.environment['PATH']}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    log = worker.files / "sshd.log"
    with log.open("w") as output:
        command = worker.command(shutil.which("sshd"), "-D", "-e")
        server = subprocess.Popen(command, env=worker.environment, stderr=output, stdout=output)
    deadline = time.monotonic() + 20
    while head.run("ssh", "-o", "BatchMode=yes", f"root@{MANAGEMENT[1]}", "true").returncode:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return server


def config(hosts, addresses=MANAGEMENT, **settings):
    """Write a cluster.toml whose link is the cable without addresses."""
    lines = ["schema = 1", *(f"{name} = {value}" for name, value in settings.items())]
    for index, (host, name) in enumerate(zip(hosts, ("head", "worker"), strict=True)):
        ssh = f"root@{MANAGEMENT[1]}" if index else ""
        lines += ["[[nodes]]", f'name = "{name}"', f'ssh = "{ssh}"', f'address = "{addresses[index]}"']
        lines += [f'interface = "{LINKS[index]}"', f'state = "{host.files / "state"}"', 'hcas = ["rocep1s0f1"]']
        lines += [f'folder = "{host.files}"']
    file = hosts[0].files / "cluster.toml"
    file.write_text("\n".join(lines) + "\n")
    return str(file)
