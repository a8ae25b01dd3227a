"""vLLM's engines for several nodes: each node's flags, variables and programs.

With the native one every node runs the same program with its own rank. The head's has the API; a worker's is
`--headless` and waits for the head at master_addr:master_port. vLLM needs nothing else to find the others.

With Ray each node runs `ray start`, the head first, and the head alone runs vLLM, which finds the others through Ray.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.command_line import HEADLESS

# NCCL's settings by the way the nodes are connected, beside those of every cluster: NETWORKING.md of
# eugr/spark-vllm-docker at 10fa84e. Cables between pairs need routing by subnet, and no merged devices.
PAIRS = {"NCCL_NET_PLUGIN": "none", "NCCL_IB_SUBNET_AWARE_ROUTING": "1", "NCCL_IB_MERGE_NICS": "0"}
TOPOLOGIES: dict[str, dict[str, str]] = {
    "two": {},
    "switch": {},
    "mesh": PAIRS,
    "ring": {**PAIRS, "NCCL_ALGO": "Ring"},
}


def arguments(config: ClusterConfig, node: ClusterNode) -> tuple[str, ...]:
    """Return the flags that make vLLM's server this node's part of the cluster; with Ray only the head runs one."""
    rank = config.nodes.index(node)
    split = {"--tensor-parallel-size": config.tensor, "--pipeline-parallel-size": config.pipeline}
    experts = ("--enable-expert-parallel",) if config.expert else ()
    if config.engine == "ray":
        flags = {**split, "--distributed-executor-backend": "ray"}
        return (*(f"{name}={value}" for name, value in flags.items()), *experts)
    flags = {
        **split,
        "--distributed-executor-backend": "mp",
        "--nnodes": len(config.nodes),
        "--node-rank": rank,
        "--master-addr": config.head.address,
        "--master-port": config.master_port,
    }
    return (*(f"{name}={value}" for name, value in flags.items()), *experts, *((HEADLESS,) if rank else ()))


def ray_start(config: ClusterConfig, node: ClusterNode) -> tuple[str, ...]:
    """Return the command that makes a node part of Ray's cluster and runs until that ends; the head's comes first."""
    port = f"{config.head.address}:{config.master_port}"
    role = ("--head", f"--port={config.master_port}") if node == config.head else (f"--address={port}",)
    return ("ray", "start", *role, f"--node-ip-address={node.address}", "--disable-usage-stats", "--block")


def by_hand(config: ClusterConfig) -> Iterator[str]:
    """Yield what to run on each node for Ray, the head first, each line with the node's name in front."""
    for node in config.nodes:
        variables = " ".join(f"{name}={value}" for name, value in environment(config, node).items())
        yield f"{node.name}: {variables} {shlex.join(ray_start(config, node))}"
    flags = shlex.join((*arguments(config, config.head), f"--port={config.port}", *config.flags))
    yield f"{config.head.name}, when all have joined: vllm serve {config.model or 'MODEL'} {flags}"


def environment(config: ClusterConfig, node: ClusterNode) -> dict[str, str]:
    """Return the variables with which Gloo, NCCL and vLLM take the control network and both halves of each port.

    Left alone, Gloo takes the address of the host's name, which is often loopback's, and NCCL any interface.
    """
    devices = {"NCCL_IB_HCA": "=" + ",".join(node.hcas), **TOPOLOGIES[config.topology]} if node.hcas else {}
    return {
        "VLLM_HOST_IP": node.address,
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": f"={node.interface}",
        **devices,
    }
