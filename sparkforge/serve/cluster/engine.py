"""vLLM's own engine for several nodes: each node's flags and variables.

Every node runs the same program with its own rank. The head's has the API; a worker's is
`--headless` and waits for the head at master_addr:master_port. vLLM needs nothing else to find the others.
"""

from __future__ import annotations

from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.command_line import HEADLESS


def arguments(config: ClusterConfig, node: ClusterNode) -> tuple[str, ...]:
    """Return the flags that make vLLM's server this node's part of the cluster."""
    rank = config.nodes.index(node)
    split = {"--tensor-parallel-size": config.tensor, "--pipeline-parallel-size": config.pipeline}
    experts = ("--enable-expert-parallel",) if config.expert else ()
    flags = {
        **split,
        "--distributed-executor-backend": "mp",
        "--nnodes": len(config.nodes),
        "--node-rank": rank,
        "--master-addr": config.head.address,
        "--master-port": config.master_port,
    }
    return (*(f"{name}={value}" for name, value in flags.items()), *experts, *((HEADLESS,) if rank else ()))


def environment(node: ClusterNode) -> dict[str, str]:
    """Return the variables with which Gloo, NCCL and vLLM take the control network and both halves of each port.

    Left alone, Gloo takes the address of the host's name, which is often loopback's, and NCCL any interface.
    """
    devices = {"NCCL_IB_HCA": "=" + ",".join(node.hcas)} if node.hcas else {}
    return {
        "VLLM_HOST_IP": node.address,
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": f"={node.interface}",
        **devices,
    }
