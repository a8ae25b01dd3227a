"""Tell systemd that a service is ready, and what it does (sd_notify(3)); nothing happens where no unit runs us."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

SOCKET = "NOTIFY_SOCKET"


def tell(*, ready: bool = False, status: str = "") -> None:
    """Send READY=1 and a status line to the service manager that started this process, if one did.

    The status is what `systemctl status` shows, in one line.
    """
    address = os.environ.get(SOCKET, "")
    if not address:
        return
    lines = (["READY=1"] if ready else []) + ([f"STATUS={' '.join(status.split())}"] if status else [])
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        # A leading @ means the abstract namespace, whose addresses begin with NUL.
        channel.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        channel.sendall("\n".join(lines).encode(errors="replace"))
