"""Start, show and stop a cluster: the head queries all nodes over ssh, and each serves its part as one machine does."""

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sparkforge.core.console import Steps, echo, say
from sparkforge.core.errors import InputError, ServerError, SparkforgeError, UsageError
from sparkforge.image import compose as docker_compose
from sparkforge.serve import access, settings
from sparkforge.serve.cluster import checks, remote
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.cluster.node import ANSWER_KEYS, LINES, NodeAnswer

MODULE = "sparkforge.serve.cluster.node"
INTERPRETER = ".venv/bin/python"  # which ./inv makes in each checkout
# `validate` may have to make the environment, or run the numerics check in a container.
SECONDS = {"validate": 1200.0, "begin": 300.0, "status": 60.0, "logs": 60.0, "down": 180.0}
# docker: 65 GB from a disk and 25 minutes of compiling, as in serve/devices/container.py.
START_SECONDS = {"embedded": 1200.0, "docker-cpu": 1200.0, "docker": 3900.0}


def up(config: ClusterConfig) -> Mapping[str, Any]:
    """Check, validate on every node, start the workers and then the head; return the head's answer.

    After an error no node's server is left running, except on nodes that the output names. Raises UsageError for
    variables that a cluster ignores, RefusalError if a check or a validation fails, else the first node's error.
    """
    for name in (access.KEY, access.KEY_FILE, docker_compose.KEY_VARIABLE, access.HOSTS):
        if os.environ.get(name):  # the head would ignore it
            why = "a cluster takes its key from key_file in cluster.toml and does not support further host names yet"
            raise UsageError(f"{name} is set", why, f"env -u {name} ./inv cluster.up")
    settings.judge(os.environ)
    steps, token = Steps(4), secrets.token_hex(16)
    with steps.step("check", f"{len(config.nodes)} nodes") as tell:
        findings = checks.evaluate_all(checks.look(config))
        checks.require_fine(findings)
        tell(f"{len(findings)} checks, none failed")

    def ask_all(nodes: Sequence[ClusterNode], action: str) -> dict[str, dict[str, Any]]:
        return remote.on_every(nodes, lambda node: ask(config, node, action, token=token))

    with steps.step("validation", "on every node") as tell:
        verdicts = ask_all(config.nodes, "validate")
        tell("; ".join(f"{name}: {answer['verdict']}" for name, answer in verdicts.items()))
    try:
        with steps.step("workers", ", ".join(node.name for node in config.workers)):
            ask_all(config.workers, "begin")
        with steps.step("head", f"{config.head.name} starts") as tell:
            answer = ask(config, config.head, "start", token=token)
            carried = f"; {answer['transport']}" if "transport" in answer else ""
            tell(f"first answers received at {answer['url']}{carried}")
    except BaseException:
        try:
            down(config)
        except ServerError as error:  # print it only: the start's error is raised
            say(f"{error.what}: {error.why}; next: {error.fix}")
        raise
    return answer


def status(config: ClusterConfig) -> dict[str, dict[str, Any]]:
    """Return the state of each node; for a node that does not answer it is `silent`, and `why` is the error."""
    answers = remote.on_all(config.nodes, lambda node: ask(config, node, "status"))
    return {
        name: {"state": "silent", "why": answer.why} if isinstance(answer, SparkforgeError) else answer
        for name, answer in answers.items()
    }


def show_status(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each node."""
    width = max(map(len, states))
    for name, state in states.items():
        echo(f"{name:<{width}}  {state['state']:<8} {state.get('why') or state.get('milestone') or ''}".rstrip())


def show_logs(config: ClusterConfig, lines: int) -> None:
    """Print the last lines of every node's log, each with the node's name in front. Raises UsageError."""
    if not 1 <= lines <= LINES:
        raise UsageError(f"--lines {lines} is out of range", f"it takes 1 to {LINES}", "./inv cluster.logs --lines 100")
    answers = remote.on_all(config.nodes, lambda node: ask(config, node, "logs", lines=lines))
    width = max(len(node.name) for node in config.nodes)
    for name, answer in answers.items():
        if isinstance(answer, SparkforgeError):
            say(f"{name}: {answer.what}: {answer.why}")
            continue
        for line in answer["lines"]:
            echo(f"{name:<{width}} | {line}")


def down(config: ClusterConfig) -> None:
    """End the servers of all nodes at the same time, whoever started them. Raises ServerError if one does not end."""
    answers = remote.on_all(config.nodes, lambda node: ask(config, node, "down"))
    for name, answer in answers.items():
        say(f"{name}: {answer.what if isinstance(answer, SparkforgeError) else answer['state']}")
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, SparkforgeError)}
    if failed:
        why = "; ".join(f"{name}: {error.why}" for name, error in failed.items())
        fix = "./inv cluster.down   # again, once they can be reached; until then each ends its part by itself"
        raise ServerError(f"{', '.join(failed)} may still run", why, fix, code="server.cluster")


def ask(config: ClusterConfig, node: ClusterNode, action: str, **more: Any) -> dict[str, Any]:
    """Return a node's answer. Raises ServerError for an error of the node, and the errors of `remote.document`."""
    request = json.dumps(
        {"action": action, "name": node.name, "config": config.model_dump(by_alias=True, mode="json"), **more}
    )
    command = [INTERPRETER if node.ssh else sys.executable, "-m", MODULE]  # in the checkout, see `remote.output`
    seconds = START_SECONDS[config.device] if action == "start" else SECONDS[action]
    answer = remote.document(node, command, NodeAnswer, seconds=seconds, stdin=request)
    if error := answer.error:
        raise ServerError(f"{node.name}: {error.what}", error.why, error.fix, code="server.cluster")
    if (key := ANSWER_KEYS[action]) not in answer.model_fields_set:
        why, fix = f"it has no {key}", "git pull   # on every node: the same Sparkforge"
        raise InputError(f"cannot read the answer of {node.name}", why, fix, code="input.facts")
    return answer.model_dump(exclude_unset=True)
