"""How a served model is split over the GPUs of a host for the benchmark."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sparkforge.core.errors import ProcessError, UsageError
from sparkforge.core.process import run

# NVLink multicast uses resources of the NVSwitches, which the host's other guests share. So it stays off in NCCL, in
# torch's symmetric memory (vLLM's custom all-reduce requests a multicast buffer there on every GPU) and in NVSHMEM.
NO_MULTICAST: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
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
    """The number of GPUs that share each layer. With `expert`, each GPU has whole experts."""

    size: int = 1
    expert: bool = False

    def named(self, word: str) -> Split:
        """Return the split that `word` names, the part of a backend's name after @. Raises UsageError.

        `1` is one GPU, `tpN` and `epN` are N GPUs; an empty word means this split.
        """
        if not word:
            return self
        match = re.fullmatch(r"(?P<kind>tp|ep|)(?P<size>[1-9]\d*)", word)
        if match is None or (not match["kind"] and match["size"] != "1"):
            raise UsageError(f"there is no split {word!r}", "choose from 1, tpN, epN", "spark@tp2")
        return Split(int(match["size"]), expert=match["kind"] == "ep")

    def check(self) -> None:
        """Raise UsageError for expert parallelism on one GPU."""
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


def transports(log: str) -> dict[str, int]:
    """Return the number of NCCL's channels by transport, such as P2P/CUMEM or NET/Socket."""
    return dict(Counter(match["way"] for match in VIA.finditer(log)))


def ranks_with(log: str, text: str) -> tuple[str, ...]:
    """Return the workers, such as Worker_TP1, whose lines contain `text`."""
    lines = (line for line in log.splitlines() if text in line)
    return tuple(sorted({match["rank"] for line in lines if (match := RANK.match(line))}))
