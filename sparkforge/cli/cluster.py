"""Commands about one model over several machines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from invoke.context import Context
from invoke.exceptions import Exit

from sparkforge.cli.command import caller_path, listed, task, whole_number
from sparkforge.core import paths
from sparkforge.core.console import echo, echo_json
from sparkforge.core.errors import ServerError

if TYPE_CHECKING:
    from sparkforge.serve.cluster.config import ClusterConfig

CONFIG = "the cluster's file; default: cluster.toml in the checkout"


@task(
    example="./inv cluster.discover --nodes local,spark-2 > cluster.toml",
    nodes="ssh destinations, the head first; local is this machine",
    device="docker, docker-cpu (a container without a GPU), or embedded: vLLM's CPU build",
    folder="absolute path of the checkout on the other machines; default: this one's path",
)
def cluster_discover(_ctx: Context, nodes: str = "", device: str = "docker", folder: str = "") -> None:
    """Propose a cluster.toml from the networks of machines.

    It queries the machines over ssh, and changes nothing on them. If a cable has no addresses, it prints the commands
    that configure it.
    """
    from sparkforge.serve.cluster import config, discover

    proposed = discover.find_nodes(listed(nodes), device, folder or str(paths.ROOT))
    echo(config.text(proposed), end="")


@task(example="./inv cluster.check", config=CONFIG, json_="print the findings as JSON")
def cluster_check(_ctx: Context, config: str = "", json_: bool = False) -> None:
    """Check all nodes before a model is served on them.

    It queries every node over ssh, sends packets between them, and starts nothing. Exit code 0 means that none failed.
    """
    from sparkforge.serve.cluster import checks
    from validate.gate import finding_lines

    findings = checks.evaluate_all(checks.look(_read(config)))
    if json_:
        echo_json([asdict(finding) for finding in findings])
    else:
        for line in finding_lines(findings):
            echo(line)
    checks.require_fine(findings)


@task(
    example="./inv cluster.up",
    config=CONFIG,
    restart="start all servers again, in order, when one of them dies (default)",
)
def cluster_up(_ctx: Context, config: str = "", restart: bool = True) -> None:
    """Serve one model over all nodes.

    It checks and validates on every node, starts the workers, then the head, and waits for the first answers. If one
    node's server ends, the others end within 30 seconds and name that node. A process on this machine then starts all
    servers again, as often as on a single machine, unless --no-restart is given. Not verified with a DGX Spark.
    """
    from sparkforge.serve.cluster import start

    cluster = _read(config)
    start.refuse_second()
    answer = start.up(cluster)
    if restart:
        start.begin_keeper(cluster)
    echo(f"{answer['url']}/v1")


@task(example="./inv cluster.status", config=CONFIG, json_="print the states as JSON")
def cluster_status(_ctx: Context, config: str = "", json_: bool = False) -> None:
    """Show every node's state, and that of the process that starts them again.

    Exit code 0 means that the server of every node runs; 24 that one does not run or does not answer.
    """
    from sparkforge.serve.cluster import start

    states, restarts = start.status(_read(config)), start.keeper_state()
    if json_:
        echo_json({"nodes": states, "restarts": restarts})
    else:
        start.show_status(states)
        echo(f"restarts: {restarts['state']}, {restarts['why']}")
    if any(state["state"] != "running" for state in states.values()):
        raise Exit(code=ServerError.exit_code)


@task(example="./inv cluster.logs --lines 100", config=CONFIG, lines="lines of each node's log, 1 to 400")
def cluster_logs(_ctx: Context, config: str = "", lines: str = "40") -> None:
    """Show the end of every node's log, with its name before each line."""
    from sparkforge.serve.cluster import start

    start.show_logs(_read(config), whole_number("--lines", lines))


@task(example="./inv cluster.down", config=CONFIG)
def cluster_down(_ctx: Context, config: str = "") -> None:
    """Stop the server on every node.

    It also ends servers that ./inv up started from the nodes' checkouts.
    """
    from sparkforge.serve.cluster import start

    cluster = _read(config)
    start.end_keeper()
    start.down(cluster)


@task(
    example="./inv cluster.sync",
    config=CONFIG,
    model="a folder on the head; default: that of cluster.toml",
    image="send the image, too; on the docker device only",
    dry_run="say what would be sent, send nothing",
)
def cluster_sync(_ctx: Context, config: str = "", model: str = "", image: bool = False, dry_run: bool = False) -> None:
    """Send the head's model and image to the other nodes.

    They go over the link. Files that exist already are not sent; an interrupted transfer is resumed.
    """
    from sparkforge.serve.cluster import sync

    cluster = _read(config)
    sync.send_model(cluster, caller_path(model), dry_run=dry_run)
    if image:
        sync.send_image(cluster, dry_run=dry_run)


def _read(path: str) -> ClusterConfig:
    from sparkforge.serve.cluster import config

    return config.read(Path(caller_path(path)) if path else paths.ROOT / config.FILE)
