"""Start, show, keep and stop a cluster: the commands send requests to all nodes over ssh (node.py).

`cluster.up` starts a keeper, `python -m sparkforge.serve.cluster.start CONFIG`, on the machine that the commands run
on, in a session of its own. The keeper polls the head, whose part ends when another node's part ends. After an
unrequested end the keeper pauses as for a single machine's server (restarts.py), waits until every node answers, ends
the remaining parts, and starts all parts as `cluster.up` does. After too many failures it gives up.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sparkforge.core import interrupt, paths
from sparkforge.core.console import Steps, echo, say, show_error
from sparkforge.core.errors import InputError, ServerError, SparkforgeError, UsageError
from sparkforge.core.files import holder, locked, read_json, write_json
from sparkforge.core.process import spawn, started_at, terminate_session
from sparkforge.image import compose as docker_compose
from sparkforge.serve import access, restarts, settings
from sparkforge.serve.cluster import checks, remote
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.cluster.node import ANSWER_KEYS, LINES, NodeAnswer
from sparkforge.serve.restarts import ServerFailure

MODULE = "sparkforge.serve.cluster.node"
INTERPRETER = ".venv/bin/python"  # ./inv creates it in each checkout
# `validate` may have to create the environment, or run the numerics check in a container.
SECONDS = {"validate": 1200.0, "begin": 300.0, "status": 60.0, "logs": 60.0, "down": 180.0}
# docker: 65 GB from a disk and 25 minutes of compiling, as in serve/devices/container.py.
START_SECONDS = {"embedded": 1200.0, "docker-cpu": 1200.0, "docker": 3900.0}
PURPOSE = "start a cluster again"
LOCK, NOTE, LOG = "cluster.lock", "cluster.keep.json", "logs/cluster.log"  # in SPARKFORGE_STATE
LOOK_SECONDS = 5.0  # each query starts an interpreter on the node
BEGIN_SECONDS = 30.0
RETURN_SECONDS = 1800.0  # for a machine's restart, with a check of its disks
END_SECONDS = 200.0  # more than the keeper's own `down` takes


def up(config: ClusterConfig) -> Mapping[str, Any]:
    """Check, validate on every node, start the workers and then the head; return the head's answer.

    After an error no node's server is left running, except on nodes that the output names. Raises UsageError for
    variables that a cluster ignores, RefusalError if a check fails, ServerError for an error of a node, and the errors
    of `remote.document`.
    """
    for name in (access.KEY, access.KEY_FILE, docker_compose.KEY_VARIABLE, access.HOSTS):
        if os.environ.get(name):  # a cluster ignores these variables
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
        except ServerError as error:  # printed only, because the error of the start is raised
            say(f"{error.what}: {error.why}; next: {error.fix}")
        raise
    return answer


def status(config: ClusterConfig) -> dict[str, dict[str, Any]]:
    """Return the state of each node; a node that does not answer has the state `silent` and the error in `why`."""
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


def keeper_pid() -> int | None:
    """Return the process id of the running keeper; None if none runs for this checkout."""
    return holder(paths.state() / LOCK, PURPOSE)


def keeper_state() -> dict[str, Any]:
    """Return the keeper's `state`, the reason (`why`), and the number of `failures` that it remembers."""
    note: dict[str, Any] = {"state": "off", "why": "nothing starts a part again", "failures": 0}
    with suppress(OSError, ValueError):
        read = read_json(paths.state() / NOTE)
        if isinstance(read, dict) and note.keys() <= read.keys() and (keeper_pid() or read["state"] == "gave up"):
            note = {name: read[name] for name in note}
    return note


def refuse_second() -> None:
    """Raise ServerError if a keeper runs, because it may be about to start the nodes."""
    if pid := keeper_pid():
        why = f"pid {pid} serves it, or is about to start it again: {keeper_state()['why']}"
        failure = "this checkout already keeps a cluster running"
        raise ServerError(failure, why, "./inv cluster.down", code="server.running")
    (paths.state() / NOTE).unlink(missing_ok=True)  # left by a keeper that gave up


def begin_keeper(config: ClusterConfig) -> int:
    """Start a keeper, and return its process id once it holds its lock. Raises ServerError if it does not start."""
    command = [sys.executable, "-m", "sparkforge.serve.cluster.start", config.model_dump_json(by_alias=True)]
    pid = spawn(command, log=paths.state() / LOG, env=os.environ, cwd=paths.ROOT)
    started, deadline = started_at(pid), time.monotonic() + BEGIN_SECONDS
    while keeper_pid() != pid:
        if started_at(pid) != started or time.monotonic() > deadline:
            why = "the nodes serve; a part that ends is not started again"
            raise ServerError("the keeper did not start", why, f"less {paths.state() / LOG}", code="server.cluster")
        time.sleep(0.05)
    return pid


def end_keeper() -> None:
    """End the keeper and any start of the cluster that it is running."""
    if pid := keeper_pid():
        terminate_session(pid, grace=END_SECONDS)  # includes its ssh processes
    (paths.state() / NOTE).unlink(missing_ok=True)


def keep(config: ClusterConfig) -> None:
    """Start the cluster again after each unrequested end. Raises ServerError after too many failures."""
    failures: tuple[ServerFailure, ...] = ()
    _note("watching", config.head.name, failures)
    while why := _next_end(config):
        while why:
            now = time.time()
            failures = restarts.recent((*failures, ServerFailure(ended=now, why=why)), now)
            if len(failures) >= restarts.MAX_FAILURES:
                why, fix = restarts.summary(failures), "./inv cluster.logs   # when the cause is gone: ./inv cluster.up"
                raise ServerError("the cluster ended too often and is not started", why, fix, code="server.restarts")
            why = _start_again(config, failures)
        _note("watching", f"started again after: {failures[-1].why}", failures)


def _next_end(config: ClusterConfig) -> str:
    """Wait until the head's part has ended, and return the reason; empty if the end was requested."""
    while True:
        with suppress(SparkforgeError):  # a head that does not answer may still serve
            answer = ask(config, config.head, "status")
            if answer["state"] == "stopped" or answer.get("asked"):
                return ""
            if answer["state"] == "ended":
                return str(answer["why"])
        time.sleep(LOOK_SECONDS)


def _start_again(config: ClusterConfig, failures: tuple[ServerFailure, ...]) -> str:
    """Pause, wait until every node answers, and start the cluster; return the reason if that failed, else ""."""
    pause = restarts.pause_seconds(failures, time.time())
    _note("pausing", f"{failures[-1].why}; the next start is in {pause:.0f} s", failures)
    time.sleep(pause)
    deadline = time.monotonic() + RETURN_SECONDS
    try:
        while silent := [name for name, node in status(config).items() if node["state"] == "silent"]:
            why = f"{', '.join(silent)} does not answer"  # a restart of a node does not count as a failure
            _note("waiting", why, failures)
            if time.monotonic() > deadline:
                why = f"{why} for {RETURN_SECONDS:g} s"
                raise ServerError("the cluster has too few nodes", why, "./inv cluster.check", code="server.cluster")
            time.sleep(LOOK_SECONDS)
        _note("starting", failures[-1].why, failures)
        down(config)
        up(config)
    except SparkforgeError as error:
        show_error(error)
        return f"{error.what}: {error.why}"
    return ""


def _note(doing: str, why: str, failures: tuple[ServerFailure, ...]) -> None:
    say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {doing}: {why}")
    with suppress(OSError):  # a full disk must not end the keeper
        write_json(paths.state() / NOTE, {"state": doing, "why": why, "failures": len(failures)})


def main(argument: str) -> int:
    """Run the keeper of the cluster with this configuration, as JSON; return the exit code."""
    config = ClusterConfig.model_validate_json(argument)
    try:
        with interrupt.caught(), locked(paths.state() / LOCK, PURPOSE):
            keep(config)
    except KeyboardInterrupt:
        return 0
    except SparkforgeError as error:
        show_error(error)
        if error.code == "server.restarts":
            _note("gave up", error.why, ())
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
