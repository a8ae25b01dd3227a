"""cluster.toml: the nodes, their addresses and network devices, and how the model is split among them."""

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self

import tomlkit
from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from sparkforge.core import tables
from sparkforge.core.errors import UsageError
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import HEADLESS, meant
from sparkforge.image.devices import DOCKER, EMBEDDED, stack_of
from sparkforge.serve.cluster import watch
from sparkforge.serve.record import checked_flags

FILE = "cluster.toml"
# Names also occur in vLLM flags, shell commands and log lines, so characters that are special there are excluded.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
# Linux's names of network interfaces have up to 15 bytes (IFNAMSIZ).
Interface = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$")]
# A destination of ssh: user@host, or a name of ~/.ssh/config. ssh would read a leading dash as an option.
Destination = Annotated[
    str, StringConstraints(pattern=r"^(([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.:-]{0,250})?$")
]
# An absolute path, because no shell expands a ~ in it.
Folder = Annotated[str, StringConstraints(pattern=r"^(/[^\x00-\x1f\x7f]*)?$", max_length=4096)]
# A value on a command line; with a leading dash it would be an option.
Argument = Annotated[str, StringConstraints(pattern=r"^([^-\s\x00-\x1f\x7f][^\x00-\x1f\x7f]*)?$", max_length=4096)]
# A value may be JSON.
Flag = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$", max_length=65536)]
Port = Annotated[int, Field(ge=1024, le=65535)]


class ClusterNode(Record):
    """One machine. `ssh` is empty for the machine that the commands run on; `folder` is the checkout on the node.

    `python` is the interpreter that serves on the embedded device; empty: that of the environment in `state`.

    `address` is the node's address on the network for vLLM's control traffic, and `interface` has that address. `hcas`
    are the RDMA devices (host channel adapters) that NCCL uses: both halves of each port.
    """

    name: Name
    ssh: Destination = ""
    folder: Folder = ""
    state: Argument = ""
    python: Argument = ""
    address: str
    interface: Interface
    hcas: tuple[Name, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """Variables with which Gloo, NCCL and vLLM use the control network and both halves of each port.

        Otherwise Gloo uses the address of the host's name, which is often the loopback address, and NCCL uses any
        interface.
        """
        return {
            "VLLM_HOST_IP": self.address,
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": f"={self.interface}",
            **({"NCCL_IB_HCA": "=" + ",".join(self.hcas)} if self.hcas else {}),
        }

    @field_validator("address")
    @classmethod
    def _is_address(cls, text: str) -> str:
        ipaddress.IPv4Address(text)
        return text


_SPLIT = ("--tensor-parallel-size", "--pipeline-parallel-size", "--distributed-executor-backend")


class ClusterConfig(Record):
    """The whole file. The first node is the head: it has the API and vLLM's scheduler.

    The fields' descriptions become comments in a generated file.
    """

    schema_: Literal[1] = Field(alias="schema")
    device: Literal["docker", "docker-cpu", "embedded"] = Field(
        "docker", description="docker; without GPUs docker-cpu, or embedded: vLLM's CPU build without a container"
    )
    model: Argument = Field("", description="a folder, the same on every node; empty: the device's default model")
    profile: Argument = Field("", description="a table of sparkforge/serve/profiles.toml; empty: the device's own")
    flags: Annotated[tuple[Flag, ...], AfterValidator(checked_flags)] = Field(
        (), description="vLLM's own flags, which override the profile's"
    )
    tensor: int = Field(2, ge=1, description="machines that share each layer")
    pipeline: int = Field(1, ge=1, description="machines that share the layers; tensor x pipeline: number of nodes")
    expert: bool = Field(False, description="whole experts on each machine instead of a part of each")
    key_file: Folder = Field("", description="the API key's file, the same path on every node")
    port: Port = Field(8000, description="of the API, on the head")
    master_port: Port = Field(29500, description="of torch.distributed, on the head")
    watch_port: Port = Field(29501, description="on the head: the port by which nodes notice that another one ended")
    nodes: tuple[ClusterNode, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        addresses = [ipaddress.IPv4Address(node.address) for node in self.nodes]
        local = [address for address in addresses if address.is_loopback]
        several = next((a for a in addresses if a.is_unspecified or a.is_multicast or a.is_reserved), None)
        count, names = len(self.nodes), {node.name for node in self.nodes}
        own = next(filter(None, (meant(flag, _SPLIT) for flag in self.flags)), "")
        for wrong, why in (
            (len(names) < count, "two nodes have the same name"),
            (len(set(addresses)) < count, "two nodes have the same address"),
            (several, f"{several} is not the address of one machine; use the node's own on the control network"),
            (local and (len(local) < count or self.has_gpus), "other machines cannot reach a node's loopback address"),
            (
                self.tensor * self.pipeline != count,
                f"tensor {self.tensor} x pipeline {self.pipeline} is not the number of nodes, {count}",
            ),
            (own, f"flags: {own} is set from `tensor`, `pipeline` and the nodes"),
            (len({self.port, self.master_port, self.watch_port}) < 3, "port, master_port and watch_port must differ"),
            (sum(not n.ssh for n in self.nodes) > 1, "two nodes have no ssh; only this machine's entry may lack it"),
        ):
            if wrong:
                raise ValueError(why)
        return self

    @property
    def in_containers(self) -> bool:
        """Whether each node's part is a container; otherwise it is a process of the embedded device."""
        return self.device != EMBEDDED

    @property
    def has_gpus(self) -> bool:
        """Whether the parts compute on GPUs, with traffic over NCCL and RDMA; otherwise over Gloo."""
        return self.device == DOCKER

    @property
    def stack(self) -> str:
        """The stack of pins.toml that serves on the device."""
        return stack_of(self.device)

    @property
    def head(self) -> ClusterNode:
        """The first node."""
        return self.nodes[0]

    @property
    def workers(self) -> tuple[ClusterNode, ...]:
        """The other nodes."""
        return self.nodes[1:]

    def watch_options(self, node: ClusterNode) -> tuple[str, ...]:
        """Return watch.py's options for a node: the head watches its workers, a worker watches the head."""
        is_head = node == self.head
        peers = [other.name for other in (self.workers if is_head else self.nodes[:1])]
        return watch.options(node.name, self.head.address, self.watch_port, peers, listen=is_head)

    def engine_flags(self, node: ClusterNode) -> tuple[str, ...]:
        """Return the vLLM flags for this node's part of the server.

        Every node runs the same program with its own rank. A worker is --headless and waits for the head at
        master_addr:master_port; vLLM needs no other address to find the nodes.
        """
        rank = self.nodes.index(node)
        flags = {
            "--tensor-parallel-size": self.tensor,
            "--pipeline-parallel-size": self.pipeline,
            "--distributed-executor-backend": "mp",
            "--nnodes": len(self.nodes),
            "--node-rank": rank,
            "--master-addr": self.head.address,
            "--master-port": self.master_port,
        }
        experts = ("--enable-expert-parallel",) if self.expert else ()
        return (*(f"{name}={value}" for name, value in flags.items()), *experts, *((HEADLESS,) if rank else ()))


def read(path: Path) -> ClusterConfig:
    """Read a cluster.toml. Raises UsageError if the file is missing, InputError if it is malformed."""
    if not path.exists():
        fix = "./inv cluster.discover --nodes spark-1,spark-2"
        raise UsageError(f"there is no {path}", "it names the nodes of the cluster", fix)
    return tables.load(path, ClusterConfig)


def text(config: ClusterConfig) -> str:
    """Return the text of a cluster.toml, with a comment on each setting."""
    settings = tomlkit.document()
    settings.add(tomlkit.comment("Nodes of one model, the head first. docs/reference/cluster.md explains every key."))
    settings["schema"] = 1
    for name, field in ClusterConfig.model_fields.items():
        if field.description:
            settings[name] = tomlkit.item(getattr(config, name)).comment(field.description)
    settings["nodes"] = [node.model_dump(mode="json") for node in config.nodes]
    return tomlkit.dumps(settings)
