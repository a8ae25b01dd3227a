"""Run a program on a node: over OpenSSH's own client, or here for the node that the commands run on.

OpenSSH reads the user's ~/.ssh/config, known hosts, keys and agent. It may ask nothing: a host that is not known or a
key that is missing is an error with the command that mends it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sparkforge.core import paths
from sparkforge.core.documents import parse_json
from sparkforge.core.errors import NetworkError, ProcessError, SparkforgeError
from sparkforge.core.process import run_unchecked
from sparkforge.serve.cluster.config import ClusterNode

CONNECT_SECONDS = 10
SSH_FAILED = 255  # ssh(1): the connection, not the program
# BatchMode: no question is asked. Alive: a node that has lost its power is noticed within 15 s.
OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=3")
Result = TypeVar("Result")


def command_line(node: ClusterNode, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the command that runs `argv` on a node, in its checkout if it names one."""
    variables = {**({"SPARKFORGE_STATE": node.state} if node.state else {}), **(environment or {})}
    program = [*(["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []), *argv]
    if not node.ssh:
        return program
    script = shlex.join(program)
    if node.folder:
        script = f"cd {shlex.quote(node.folder)} && exec {script}"
    return ["ssh", *(word for option in OPTIONS for word in ("-o", option)), "--", node.ssh, script]


def output(
    node: ClusterNode, argv: Sequence[str], *, seconds: float, stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Return what a program prints on a node.

    Raises NetworkError if the node cannot be reached, ProcessError if the program fails or takes longer than `seconds`.
    """
    command = command_line(node, argv, environment)
    result = run_unchecked(command, cwd=None if node.ssh else paths.ROOT, stdin=stdin, seconds=seconds)
    if not result.returncode:
        return result.stdout
    why = result.stderr.strip() or result.stdout.strip() or f"it ended with code {result.returncode}"
    if node.ssh and result.returncode == SSH_FAILED:
        last = why.splitlines()[-1]
        raise NetworkError(f"{node.name} cannot be reached by ssh", last, f"ssh {node.ssh} true", code="network.node")
    by_hand = shlex.join(command_line(node, argv[:3], environment))
    raise ProcessError(f"{argv[0]} failed on {node.name}", why, f"run it by hand: {by_hand}", code="process.failed")


def document(node: ClusterNode, argv: Sequence[str], *, seconds: float, stdin: str | None = None) -> Any:
    """Return the JSON that a program prints on a node. Raises what `output` raises, and StorageError for no JSON."""
    return parse_json(output(node, argv, seconds=seconds, stdin=stdin), f"the answer of {node.name}")


def program(node: ClusterNode, source: str, argument: Mapping[str, Any], *, seconds: float) -> Any:
    """Run a Python program's source text on a node, with one JSON argument, and return the JSON that it prints.

    It needs python3 there and nothing of ours. Raises what `document` raises.
    """
    return document(node, ["python3", "-", json.dumps(argument)], seconds=seconds, stdin=source)


def on_all(nodes: Sequence[ClusterNode], call: Callable[[ClusterNode], Result]) -> dict[str, Result | SparkforgeError]:
    """Call a function with every node at the same time; return result or error by the node's name."""

    def attempt(node: ClusterNode) -> Result | SparkforgeError:
        """Return an error instead of raising it: the other nodes' results are wanted all the same."""
        try:
            return call(node)
        except SparkforgeError as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as pool:
        return dict(zip((node.name for node in nodes), pool.map(attempt, nodes), strict=True))


def on_every(nodes: Sequence[ClusterNode], call: Callable[[ClusterNode], Result]) -> dict[str, Result]:
    """Call a function as `on_all` does. Raises the first node's error, after all have ended."""
    answers = on_all(nodes, call)
    for answer in answers.values():
        if isinstance(answer, SparkforgeError):
            raise answer
    return {name: answer for name, answer in answers.items() if not isinstance(answer, SparkforgeError)}
