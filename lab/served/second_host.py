"""A second host on this machine: a network namespace with a cable to ours, and its own /dev/shm. Needs root.

A machine with GPUs may lack `ip`, so the cable is made by netlink itself. `second_host.py up INTERFACE [ADDRESS]` runs
inside the namespace and imports nothing of ours.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = ("127.0.0.1", "127.0.0.2")
NUMBERS = itertools.count()  # of the second hosts of this process
SECONDS = 20.0
# linux/rtnetlink.h, linux/if_link.h, linux/veth.h, linux/netlink.h
RTM_NEWLINK, NLMSG_ERROR, VETH_INFO_PEER = 16, 2, 1
NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_PID, IFLA_INFO_KIND, IFLA_INFO_DATA = 3, 18, 19, 1, 2
SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x891C, 0x8913, 0x8914, 0x1  # linux/sockios.h
# A mount of sysfs shows the interfaces of the namespace that mounted it.
OWN_INTERFACES = """exec 3>&1 > /dev/null 2>&1
folder=$(mktemp -d) && mount -t sysfs sysfs "$folder" && for part in class devices/virtual; do
    mount --bind "$folder/$part/net" /sys/$part/net
done
umount "$folder"; rmdir "$folder"
exec >&3 2>&1;"""


@dataclass(frozen=True)
class SecondHost:
    """Both ends' interfaces and addresses, ours first; `inside` is what goes in front of the second host's commands.

    Without a namespace of its own both are this machine's loopback: sockets still, but no cable.
    """

    interfaces: tuple[str, str]
    addresses: tuple[str, str]
    inside: tuple[str, ...]
    kind: str


@contextmanager
def second_host(*, own_network: bool = True) -> Iterator[SecondHost]:
    """Make the second host and remove it at the end. Raises OSError if the kernel refuses it.

    The namespaces live as long as the process that holds them; the cable goes with them.
    """
    number = next(NUMBERS)
    names = (f"sfa{os.getpid()}-{number}", f"sfb{os.getpid()}-{number}")
    addresses = (f"10.79.{number}.1", f"10.79.{number}.2")
    spaces = ("--mount", "--ipc", *(("--net",) if own_network else ()))
    # Without shared memory in common the two parts of vLLM see that they are not on one host.
    hold = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec sleep infinity"
    command = ["unshare", *spaces, "sh", "-c", f"{OWN_INTERFACES} {hold}" if own_network else hold]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        answer = holder.stdout.readline().strip() if holder.stdout else ""
        if answer != "ready":
            raise OSError(f"no second host's namespaces: {answer}")
        inside = ("nsenter", "--target", str(holder.pid), *spaces)
        if own_network:
            make_cable(*names, holder.pid)
            bring_up(names[0], addresses[0])
            for arguments in ((names[1], addresses[1]), ("lo",)):
                _inside(inside, *arguments)
            yield SecondHost(names, addresses, inside, "network namespaces, joined by a veth pair")
        else:
            yield SecondHost(("lo", "lo"), LOOPBACK, inside, "one network: both on loopback")
    finally:
        holder.kill()
        holder.wait()
        wait_until_gone(names[0])


def _inside(inside: tuple[str, ...], *arguments: str) -> None:
    command = [*inside, sys.executable, "-P", __file__, "up", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if result.returncode:
        raise OSError(f"{arguments[0]} cannot be brought up: {result.stderr.strip()[-300:]}")


def wait_until_gone(interface: str) -> None:
    """Wait until the kernel has removed our end of the cable, which it does after the other one's namespace."""
    deadline = time.monotonic() + SECONDS
    while Path("/sys/class/net", interface).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def make_cable(ours: str, theirs: str, pid: int) -> None:
    """Make a veth pair: `ours` here, `theirs` in the network namespace of process `pid`. Raises OSError."""
    interface = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, 0, 0, 0)
    peer = interface + _text(IFLA_IFNAME, theirs) + _attribute(IFLA_NET_NS_PID, struct.pack("=I", pid))
    data = _attribute(IFLA_INFO_DATA, _attribute(VETH_INFO_PEER, peer))
    body = interface + _text(IFLA_IFNAME, ours) + _attribute(IFLA_LINKINFO, _text(IFLA_INFO_KIND, "veth") + data)
    flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.settimeout(SECONDS)
        link.send(struct.pack("=IHHII", 16 + len(body), RTM_NEWLINK, flags, 1, 0) + body)
        answer = link.recv(1 << 16)
    kind, error = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, 16)[0]
    if kind != NLMSG_ERROR or error:
        raise OSError(-error, f"no veth pair: {os.strerror(-error)}")


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def bring_up(interface: str, address: str = "") -> None:
    """Switch an interface of this namespace on, with an IPv4 address of a network of 256 if given. Raises OSError."""
    name = interface.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")) if address else ():
            packed = struct.pack("=16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(control, request, packed)
        answer = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("=16sH14x", name, 0))
        flags = struct.unpack_from("=H", answer, 16)[0] | IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("=16sH14x", name, flags))


if __name__ == "__main__":
    bring_up(*sys.argv[2:])
