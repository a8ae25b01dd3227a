"""cluster.toml: the nodes, their addresses and network devices, and how the model is split over them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import tomlkit
from pydantic import Field, StringConstraints, field_validator, model_validator

from sparkforge.core import tables
from sparkforge.core.errors import UsageError
from sparkforge.core.files import write_atomic
from sparkforge.core.tables import Record

FILE = "cluster.toml"
# Also of a vLLM flag, a shell command and a log line, so nothing that either would read otherwise.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
# A destination of ssh: user@host, or a name of ~/.ssh/config. A dash at the start of either would be an option.
Destination = Annotated[
    str, StringConstraints(pattern=r"^(([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.:-]{0,250})?$")
]
Folder = Annotated[str, StringConstraints(pattern=r"^(/.*)?$")]  # absolute: no shell expands a ~ in it
Port = Annotated[int, Field(ge=1024, le=65535)]
Topology = Literal["two", "switch", "mesh", "ring"]


class ClusterNode(Record):
    """One machine. `ssh` is empty for the one that the commands run on; `folder` is the checkout there.

    `python` is the interpreter that serves on the embedded device; empty: that of the environment in `state`.

    `address` is its own on the network that carries vLLM's control traffic, `interface` the device with that address,
    `hcas` the RDMA devices that NCCL uses: both halves of each port.
    """

    name: Name
    ssh: Destination = ""
    folder: Folder = ""
    state: str = ""
    python: str = ""
    address: str
    interface: Name
    hcas: tuple[Name, ...] = ()

    @field_validator("address")
    @classmethod
    def _is_address(cls, text: str) -> str:
        ipaddress.IPv4Address(text)
        return text


class ClusterConfig(Record):
    """The whole file. The first node is the head: it has the API and vLLM's scheduler."""

    schema_: Literal[1] = Field(alias="schema")
    engine: Literal["native"] = "native"
    device: Literal["docker", "embedded"] = "docker"
    topology: Topology = "two"
    model: str = ""
    profile: str = ""
    flags: tuple[str, ...] = ()
    tensor: int = Field(default=2, ge=1)
    pipeline: int = Field(default=1, ge=1)
    expert: bool = False
    port: Port = 8000
    master_port: Port = 29500
    watch_port: Port = 29501
    nodes: tuple[ClusterNode, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _fits_together(self) -> ClusterConfig:
        for what_for, values in (
            ("name", [node.name for node in self.nodes]),
            ("address", [node.address for node in self.nodes]),
        ):
            if len(set(values)) != len(values):
                raise ValueError(f"two nodes have the same {what_for}")
        if self.tensor * self.pipeline != len(self.nodes):
            split = f"tensor {self.tensor} x pipeline {self.pipeline}"
            raise ValueError(f"{split} is not the number of nodes, {len(self.nodes)}: each has one GPU")
        if len({self.port, self.master_port, self.watch_port}) < 3:
            raise ValueError("port, master_port and watch_port must differ")
        if sum(not node.ssh for node in self.nodes) > 1:
            raise ValueError("two nodes have no ssh: only the machine that the commands run on has none")
        return self

    @property
    def head(self) -> ClusterNode:
        """The first node."""
        return self.nodes[0]

    @property
    def workers(self) -> tuple[ClusterNode, ...]:
        """The other nodes."""
        return self.nodes[1:]


def read(path: Path) -> ClusterConfig:
    """Read a cluster.toml. Raises UsageError if there is none, InputError for one that is malformed."""
    if not path.exists():
        fix = "./inv cluster.discover --nodes spark-1,spark-2"
        raise UsageError(f"there is no {path}", "it names the nodes of the cluster", fix)
    return tables.load(path, ClusterConfig)


def write(path: Path, config: ClusterConfig) -> None:
    """Write a cluster.toml with a comment on each setting. Raises OSError."""
    write_atomic(path, text(config))


def text(config: ClusterConfig) -> str:
    """Return the file's text."""
    return "\n".join(_lines(config)) + "\n"


COMMENTS = {
    "engine": "vLLM's own multi-node engine",
    "device": "docker, or embedded: vLLM's CPU build",
    "topology": "two, switch, mesh (three nodes) or ring",
    "model": "a folder, the same on every node; empty: what the device serves by itself",
    "profile": "a table of sparkforge/serve/profiles.toml; empty: the device's own",
    "flags": "vLLM's own, which win over the profile's",
    "tensor": "machines that share each layer",
    "pipeline": "machines that share the layers; tensor x pipeline is the number of nodes",
    "expert": "whole experts on each machine instead of a part of each",
    "port": "of the API, on the head",
    "master_port": "torch.distributed's, on the head",
    "watch_port": "on which nodes notice that another one has ended, on the head",
}


def _lines(config: ClusterConfig) -> Iterator[str]:
    yield "# Nodes of one model, the head first. docs/reference/cluster.md explains every key."
    yield "schema = 1"
    for name, why in COMMENTS.items():
        yield f"{name} = {_literal(getattr(config, name))}  # {why}"
    for node in config.nodes:
        yield ""
        yield "[[nodes]]"
        for name, value in node.model_dump().items():
            yield f"{name} = {_literal(value)}"


def _literal(value: object) -> str:
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()
