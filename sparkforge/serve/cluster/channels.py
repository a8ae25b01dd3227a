"""What NCCL's log says of the way that carries its channels between nodes: RDMA or TCP."""

from __future__ import annotations

import re
from dataclasses import dataclass

# NCCL with NCCL_DEBUG=INFO: "Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/1", and a plugin's name in place of IB.
CHANNEL = re.compile(
    r"NCCL INFO Channel \S+ : \S+ -> \S+ \[(?:send|receive)\] via NET/(?P<kind>[A-Za-z]+)\w*/(?P<device>\d+)"
)


@dataclass(frozen=True)
class Transport:
    """What NCCL's log says about the channels between nodes: how many go over RDMA's devices, how many over TCP."""

    rdma: int
    devices: tuple[int, ...]
    tcp: int

    @property
    def description(self) -> str:
        """One line for people."""
        if self.tcp:
            return f"TCP carries {self.tcp} of {self.tcp + self.rdma} channels"
        return f"RDMA carries all {self.rdma} channels, over {len(self.devices)} devices" if self.rdma else "not known"


def transport(log: str) -> Transport:
    """Read NCCL's channels between nodes from a log; those within a node are not counted."""
    channels = [(match["kind"], int(match["device"])) for match in CHANNEL.finditer(log)]
    rdma = [device for kind, device in channels if kind.startswith("IB")]
    return Transport(len(rdma), tuple(sorted(set(rdma))), len(channels) - len(rdma))
