"""Two hosts as network namespaces, each with its own /etc, /var/lib and home, and a cable that nothing has configured.

A second cable is the network by which they are reached at first. Where netplan and systemd-networkd are installed, they
are the real ones, and programs in place of systemd's start and end each host's networkd. Elsewhere STAND_IN stands for
netplan: it gives the interfaces of our file their addresses by `ip`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import cluster_nodes as namespaces
import pytest
import yaml

from sparkforge.core.paths import ROOT
from sparkforge.serve.cluster import start

MANAGEMENT, LINKS = ("10.78.0.1", "10.78.0.2"), ("link0", "link1")
BUS, CONNECTIONS = "DBUS_SYSTEM_BUS_ADDRESS", "NetworkManager/system-connections"
NETWORKD = Path("/lib/systemd/systemd-networkd")
REAL = shutil.which("netplan") if NETWORKD.exists() else None
STAND_IN = f"""#!{sys.executable}
import subprocess, sys
if sys.argv[1] == "generate":
    sys.exit()
import pathlib, yaml
for file in pathlib.Path("/etc/netplan").glob("90-sparkforge-cluster.yaml"):
    for name, entry in yaml.safe_load(file.read_text())["network"]["ethernets"].items():
        subprocess.run(["ip", "link", "set", name, "mtu", str(entry["mtu"]), "up"], check=True)
        for address in entry.get("addresses", []):
            subprocess.run(["ip", "addr", "replace", address, "dev", name], check=True)
"""
# netplan asks networkctl first, which needs D-Bus, and then systemctl. With /sys read-only networkd does not wait for
# udev, as in a container.
SYSTEMD = {
    "netplan": f'exec {REAL} "$@"',
    "networkctl": "exit 1",
    "udevadm": "exit 0",
    "systemctl": f"""case "$*" in
*"restart "*systemd-networkd*)
    [ ! -e FILES/networkd.pid ] || kill "$(cat FILES/networkd.pid)"
    setsid unshare --mount sh -c 'mount -o remount,ro /sys && exec {NETWORKD}' < /dev/null >> FILES/networkd.log 2>&1 &
    echo $! > FILES/networkd.pid ;;
*is-*) exit 3 ;;
esac""",
}
ENTER = """mount --bind "$0/etc" /etc && mount --bind "$0/lib" /var/lib && mkdir -p /run/systemd &&
mount --bind "$0/run" /run/systemd && exec "$@"
"""


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

    def snapshot(self):
        """Every file's bytes and mode below the folders of the network's programs, /etc/sysctl.d and the home."""
        roots = (self.etc / "netplan", self.etc / CONNECTIONS, self.etc / "sysctl.d", self.home)
        files = [file for root in roots for file in root.rglob("*") if file.is_file()]
        return {file: (file.read_bytes(), file.stat().st_mode) for file in files}

    def addresses(self, link):
        addresses = self.run("ip", "-o", "-4", "addr", "show", "dev", link)
        mtu = self.run("cat", f"/sys/class/net/{link}/mtu")
        return [line.split()[3] for line in addresses.stdout.splitlines()], int(mtu.stdout)


def files_of(work, name):
    """Make a host's files: a small /etc in which root's home is a folder of ours."""
    files = work / name
    for folder in ("etc/netplan", "etc/sysctl.d", "etc/ssh", "lib", "home/.ssh", "bin", "state", "run/netif"):
        (files / folder).mkdir(parents=True)
    if REAL:
        shutil.chown(files / "run/netif", "systemd-network", "systemd-network")
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
    (files / "etc/netplan/01-network-manager-all.yaml").write_text("network:\n  version: 2\n")
    (files / "etc/netplan/01-network-manager-all.yaml").chmod(0o600)
    return files


def running_hosts(work, network_manager=False):
    """Yield both hosts, the first one with an ssh client that the second one's sshd lets in.

    netplan configures their networks, or NetworkManager, each with a message bus of its own.
    """
    hosts, server, daemons = [], None, []
    try:
        for letter in "ab":
            space = f"sfh{os.getpid()}{'n' * network_manager}{letter}"
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
        for host in hosts:
            start_network_manager(host, daemons) if network_manager else start_netplan(host)
        server = start_sshd(*hosts)
        yield hosts
    finally:
        for daemon in filter(None, (server, *daemons[::-1])):
            daemon.terminate()
            daemon.wait(20)
        for host in hosts:
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((host.files / "networkd.pid").read_text()), signal.SIGTERM)
            subprocess.run([namespaces.IP, "netns", "del", host.space], check=False, capture_output=True)


def start_netplan(host):
    """Give a host the real netplan with programs in place of systemd's, or a stand-in for netplan."""
    for name, script in SYSTEMD.items() if REAL else ():
        host.stand_in(name, f"#!/bin/sh\n{script.replace('FILES', str(host.files))}\n")
    if not REAL:
        host.stand_in("netplan", STAND_IN)


def start_network_manager(host, daemons):
    """Start a host's message bus and NetworkManager, add them to `daemons`, and wait until it answers."""
    shutil.rmtree(host.etc / "netplan")
    bus, folder = f"unix:path={host.files}/bus", host.etc / "NetworkManager"
    (host.etc / CONNECTIONS).mkdir(parents=True)
    (host.files / "lib/NetworkManager").mkdir()
    (folder / "NetworkManager.conf").write_text(
        "[main]\nplugins=keyfile\nauth-polkit=false\ndns=none\nrc-manager=unmanaged\n"
        "[keyfile]\nunmanaged-devices=interface-name:mgmt*\n"
    )
    (host.files / "bus.conf").write_text(
        '<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"'
        ' "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">'
        f"<busconfig><type>system</type><listen>{bus}</listen><auth>EXTERNAL</auth><policy context='default'>"
        "<allow user='*'/><allow own='*'/><allow send_destination='*'/><allow receive_sender='*'/></policy>"
        "</busconfig>"
    )
    host.environment[BUS] = bus
    # With /sys read-only it does not wait for udev, as in a container; its run folder is its own.
    own = "mount -o remount,ro /sys && mkdir -p /run/NetworkManager && mount -t tmpfs none /run/NetworkManager"
    commands = (
        ("dbus-daemon", f"--config-file={host.files}/bus.conf", "--nofork", "--nopidfile"),
        ("sh", "-c", f"{own} && exec NetworkManager --no-daemon"),
    )
    for index, command in enumerate(commands):
        with (host.files / f"daemon{index}.log").open("w") as log:
            daemons.append(subprocess.Popen(host.command(*command), env=host.environment, stdout=log, stderr=log))
    deadline = time.monotonic() + 60
    while host.run("nmcli", "--terse", "general", "status").returncode:
        assert time.monotonic() < deadline, (host.files / "daemon1.log").read_text()
        time.sleep(0.05)


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
        f"KbdInteractiveAuthentication no\nPermitRootLogin yes\nSetEnv PATH={worker.environment['PATH']}"
        f"{f' {BUS}={worker.environment[BUS]}' if BUS in worker.environment else ''}\n"
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


def checkout(host):
    """Make a host's folder pass for a checkout on which ./inv was run."""
    interpreter = host.files / start.INTERPRETER
    interpreter.parent.mkdir(parents=True, exist_ok=True)
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)


def ethernets(host):
    """What our netplan file says."""
    return yaml.safe_load((host.etc / "netplan/90-sparkforge-cluster.yaml").read_text())["network"]["ethernets"]
