"""How a served model is split over GPUs for the benchmark: of one host, or each GPU as a host of its own."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lab.served.second_host import SecondHost
from sparkforge.core.errors import ProcessError, UsageError
from sparkforge.core.process import run
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode

# NVLink multicast takes a share of the NVSwitches, which the host's other guests use too: it stays off in NCCL, in
# torch's symmetric memory (vLLM's custom all-reduce asks it for a multicast buffer on every GPU) and in NVSHMEM.
NO_MULTICAST: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
# What two hosts do not have: a way from GPU to GPU, common memory, and here no RDMA either.
SOCKETS_ONLY: Mapping[str, str] = {
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
MULTICAST = (
    "import torch; from torch._C._autograd import DeviceType; from torch._C._distributed_c10d import _SymmetricMemory; "
    "print(any(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, i) for i in range(torch.cuda.device_count())))"
)
# NCCL with NCCL_DEBUG=INFO: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "... [send] via NET/Socket/0".
VIA = re.compile(r"NCCL INFO Channel \S+ : \S+ -> \S+ (?:\[(?:send|receive)\] )?via (?P<way>[A-Za-z0-9]+/[A-Za-z]+)")
RANK = re.compile(r"^\((?P<rank>Worker\S*) pid=\d+\)")


@dataclass(frozen=True)
class Split:
    """GPUs that share each layer; `expert` gives each whole experts; `hosts` makes each GPU a host of its own."""

    size: int = 1
    expert: bool = False
    hosts: bool = False

    def named(self, word: str) -> Split:
        """Return the split that follows an @ in a backend's name. Raises UsageError for another word.

        `1` is one GPU, `tpN` and `epN` are N, `hosts` is two as two hosts; an empty word is this split.
        """
        if not word:
            return self
        match = re.fullmatch(r"(?P<kind>tp|ep|)(?P<size>[1-9]\d*)", word)
        if word != "hosts" and (match is None or (not match["kind"] and match["size"] != "1")):
            raise UsageError(f"there is no split {word!r}", "known are 1, tpN, epN and hosts", "spark@tp2")
        if match is None:
            return replace(self, size=2, hosts=True)
        return Split(int(match["size"]), expert=match["kind"] == "ep")

    def check(self) -> None:
        """Raise UsageError for what cannot be split so."""
        if self.hosts and self.size != 2:
            raise UsageError("two hosts have one GPU each", f"--tensor-parallel is {self.size}", "--tensor-parallel 2")
        if self.expert and self.size == 1:
            why = "one GPU has all experts"
            raise UsageError("experts cannot be spread over one GPU", why, "--tensor-parallel 2")

    def arguments(self) -> tuple[str, ...]:
        """Return the flags for GPUs of one host."""
        if self.size == 1:
            return ()
        expert = ("--enable-expert-parallel",) if self.expert else ()
        return ("--tensor-parallel-size", str(self.size), "--distributed-executor-backend", "mp", *expert)

    def environment(self) -> dict[str, str]:
        """Return the variables of every process of the server."""
        return {**NO_MULTICAST, "NCCL_DEBUG": "INFO"} if self.size > 1 else {}


@functools.cache
def all_reduce_flags(python: str) -> tuple[str, ...]:
    """Return the flag that keeps vLLM from its custom all-reduce if torch would make multicast buffers for it."""
    try:
        off = run([python, "-c", MULTICAST], env=NO_MULTICAST, seconds=120).stdout.strip() == "False"
    except ProcessError:
        off = False
    return () if off else ("--disable-custom-all-reduce",)


@dataclass(frozen=True)
class HostPart:
    """What one host's vLLM gets beside the flags of every host; `prefix` goes in front of its command."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    prefix: tuple[str, ...] = ()


def parts(split: Split, host: SecondHost, port: int, master_port: int) -> tuple[HostPart, HostPart]:
    """Return the flags and variables of the head, in this network namespace, and of the worker, in the other one."""
    nodes = tuple(
        ClusterNode(name=name, ssh=address if name == "worker" else "", address=address, interface=interface)
        for name, address, interface in zip(("head", "worker"), host.addresses, host.interfaces, strict=True)
    )
    fields = {"device": "embedded", "tensor": split.size, "expert": split.expert, "port": port, "nodes": nodes}
    config = ClusterConfig.model_validate({"schema": 1, "master_port": master_port, **fields})
    host_parts = []
    for gpu, node in enumerate(nodes):
        # NCCL takes two processes for one host's by the host's name and boot id, which network namespaces share. Graphs
        # that vLLM compiled for two GPUs of one host name device 1, which a host with one GPU does not have.
        cache = Path.home() / ".cache" / "vllm-of-two-hosts" / node.name
        own = {"CUDA_VISIBLE_DEVICES": str(gpu), "NCCL_HOSTID": node.name, "VLLM_CACHE_ROOT": str(cache)}
        environment = {**node.variables, **SOCKETS_ONLY, **own}
        host_parts.append(HostPart(config.engine_flags(node), environment, host.inside if gpu else ()))
    return host_parts[0], host_parts[1]


def transports(log: str) -> dict[str, int]:
    """Return how many of NCCL's channels go which way, such as P2P/CUMEM or NET/Socket."""
    return dict(Counter(match["way"] for match in VIA.finditer(log)))


def ranks_with(log: str, text: str) -> tuple[str, ...]:
    """Return the workers, such as Worker_TP1, whose lines have `text`."""
    lines = (line for line in log.splitlines() if text in line)
    return tuple(sorted({match["rank"] for line in lines if (match := RANK.match(line))}))


def worker_log(log: Path) -> Path:
    """Return the log of the second host's part."""
    return log.with_suffix(".worker.log")


def default_split(tensor: int, *, expert: bool, hosts: bool) -> Split:
    """Return the split of the backends whose names have none. Raises UsageError."""
    split = Split(max(tensor, 2) if hosts else tensor, expert=expert, hosts=hosts)
    split.check()
    return split
