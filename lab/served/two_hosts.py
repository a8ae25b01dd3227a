"""Serves the tiny checkpoint over two hosts by `./inv cluster.up`, kills the worker, and sees both come back.

`python -m lab.served.two_hosts --out FILE.json` needs root: the second host is a network namespace with a veth pair
(`second_host`), GPU 0 is the head's and GPU 1 the worker's, and NCCL has sockets alone. A program that enters the
namespace stands for ssh. Tokens are compared with those of one machine (`first_answers`). Each step's result is written
as it comes. Behind `--` are flags for vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.served import ranks
from lab.served.second_host import SecondHost, second_host
from sparkforge.bench.context import gpus
from sparkforge.core.console import say
from sparkforge.core.errors import ServerError
from sparkforge.core.files import write_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, session_members, started_at, with_variable
from sparkforge.core.program import exit_code
from sparkforge.serve import first_answers, record
from sparkforge.serve.cluster.containers import transport

MODEL = "tiny"
END_SECONDS = 30.0
NODES = ("head", "worker")
ORDER = ("pausing: node worker: ", "] validation", "] workers", "] head")  # of the log of what starts them again
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
exec {inside} env {variables} sh -c "$*"
"""


@dataclass(frozen=True)
class Cluster:
    """Both hosts' states, and how a command of ours is run on the first one."""

    work: Path
    file: Path
    environment: Mapping[str, str]

    def state(self, node: str) -> Path:
        """Return a node's state folder."""
        return self.work / node

    def inv(self, *words: str, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command of `./inv` with this configuration; it may fail."""
        command = [str(ROOT / "inv"), *words, "--config", str(self.file)]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )

    def processes(self, node: str) -> list[int]:
        """Return what is left of a node's servers."""
        return [pid for pid in with_variable(record.MARK, record.mark(self.state(node))) if started_at(pid) is not None]

    def log(self, node: str, name: str = "server.log") -> str:
        """Return a log of a node; empty if there is none."""
        file = self.state(node) / "logs" / name
        return file.read_text(errors="replace") if file.exists() else ""


def write_cluster(work: Path, host: SecondHost, python: str, port: int, flags: Sequence[str]) -> Cluster:
    """Write the checkpoint, cluster.toml and the stand-in for ssh."""
    model = work / MODEL
    run([python, "-m", "sparkforge.models.tiny", str(model)], cwd=ROOT)
    lines = ["schema = 1", 'device = "embedded"', f"port = {port}", f"model = {json.dumps(str(model))}"]
    lines += [f"master_port = {port + 1}", f"watch_port = {port + 2}", f"flags = {json.dumps(list(flags))}"]
    for name, ssh, address, interface in zip(NODES, ("", "root@worker"), host.addresses, host.interfaces, strict=True):
        fields = {"name": name, "ssh": ssh, "address": address, "interface": interface, "folder": str(ROOT)}
        fields |= {"state": str(work / name), "python": python}
        lines += ["[[nodes]]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    file, ssh_file = work / "cluster.toml", work / "bin" / "ssh"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    ssh_file.parent.mkdir(exist_ok=True)
    variables = shlex.join(f"{key}={value}" for key, value in own("worker", 1).items())
    ssh_file.write_text(SSH.format(inside=shlex.join(host.inside), variables=variables), encoding="utf-8")
    ssh_file.chmod(0o755)
    environment = {**os.environ, **ranks.NO_MULTICAST, **ranks.SOCKETS_ONLY, **own("head", 0), "NCCL_DEBUG": "INFO"}
    environment |= {"PATH": f"{ssh_file.parent}:{os.environ['PATH']}", "SPARKFORGE_STATE": str(work / NODES[0])}
    # The embedded device's checks are about vLLM's CPU build, and the interpreter may hold the one for CUDA.
    return Cluster(work, file, environment | {"SPARKFORGE_VALIDATE": "off"})


def own(name: str, gpu: int) -> dict[str, str]:
    """Return a host's own variables: NCCL takes two processes for one host's by what network namespaces share."""
    return {"CUDA_VISIBLE_DEVICES": str(gpu), "NCCL_HOSTID": name}


def measure(cluster: Cluster, url: str, seconds: float, result: dict[str, Any], write: Callable[[], None]) -> None:
    """Start, compare, kill the worker's rank, wait for both, compare again. Raises ServerError where one fails."""
    begun = time.monotonic()
    up = cluster.inv("cluster.up", seconds=seconds)
    result["up"] = {"seconds": passed(begun), "code": up.returncode, "said": (up.stdout + up.stderr)[-3000:]}
    write()
    if up.returncode:
        raise ServerError("cluster.up failed", result["up"]["said"], f"less {cluster.work}/*/logs/server.log")
    log = cluster.log("head") + cluster.log("worker")
    result |= {"nccl_channels": ranks.transports(log), "carried": transport(log).description}
    result["tokens"] = compare(url)
    write()
    states = json.loads(cluster.inv("cluster.status", "--json", seconds=60).stdout)["nodes"]
    former = [pid for state in states.values() for pid in session_members(state["pid"])]
    victims = [pid for pid in cluster.processes("worker") if b"VLLM::Worker" in cmdline(pid)]
    begun = time.monotonic()
    os.kill(victims[0], signal.SIGKILL)
    ended = wait_for(lambda: not any(map(started_at, former)), END_SECONDS)
    result["killed"] = {"both_ended": ended, "seconds": passed(begun)}
    note = cluster.state("head") / "cluster.keep.json"
    back = wait_for(lambda: json.loads(note.read_text())["why"].startswith("started again"), seconds)
    kept = cluster.log("head", "cluster.log")
    places = [kept.find(step) for step in ORDER]
    result["killed"] |= {
        "named": "node worker ended this node's part" in cluster.log("head", "server.previous.log"),
        "back": back,
        "back_seconds": passed(begun),
        "in_order": -1 not in places and places == sorted(places),
    }
    write()
    result["tokens_again"] = compare(url)


def compare(url: str) -> dict[str, Any]:
    """Return whether the tokens are those of one machine, and how far the log probabilities are from float32's."""
    try:
        return {"passed": True, "mean_logprob_difference": first_answers.compare(Endpoint(url, MODEL, key=""))}
    except ServerError as error:
        return {"passed": False, "error": str(error)}


def cmdline(pid: int) -> bytes:
    """Return a process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def passed(begun: float) -> float:
    """Return the seconds since `begun`."""
    return round(time.monotonic() - begun, 1)


def wait_for(true: Callable[[], bool], seconds: float) -> bool:
    """Wait until it is true; tell whether it was in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def serve(options: argparse.Namespace) -> None:
    """Make the second host, measure, and leave nothing. Raises ServerError for what is not as it should be."""
    options.work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"gpus": gpus()}
    with second_host() as host:
        result["two_hosts"] = host.kind
        cluster = write_cluster(options.work, host, options.python, options.port, options.flags)
        try:
            url = f"http://127.0.0.1:{options.port}"
            measure(cluster, url, options.seconds, result, lambda: write_json(options.out, result))
        finally:
            down = cluster.inv("cluster.down", seconds=300)
            left = {node: cluster.processes(node) for node in NODES}
            result["down"] = {"code": down.returncode, "left": left}
            write_json(options.out, result)
            say(json.dumps(result))
    killed, tokens = result["killed"], (result["tokens"], result["tokens_again"])
    if not all((*(killed[key] for key in ("both_ended", "named", "back", "in_order")), *(t["passed"] for t in tokens))):
        raise ServerError("two hosts do not serve as one", json.dumps(killed), f"less {options.out}")


def main(arguments: Sequence[str]) -> int:
    """Return 0 if all was as it should be."""
    parser = argparse.ArgumentParser(prog="python -m lab.served.two_hosts", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that gets the results")
    parser.add_argument("--work", type=Path, default=Path("/tmp/two-hosts"), help="states and logs")  # noqa: S108
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--port", type=int, default=8200, help="and the next two")
    parser.add_argument("--seconds", type=float, default=300, help="how long a start may take")
    parser.add_argument("flags", nargs="*", help="for vLLM, behind --")
    options = parser.parse_args(arguments)
    return exit_code(lambda: serve(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
