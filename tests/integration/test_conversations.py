"""Client libraries with real vLLM and the scripted checkpoint: the table of docs/reference/clients.md.

Each client's script (tests/integration/clients) runs all of its features in one process, in the client's environment.
Clients that need no separate environment run daily, the others nightly. A line with `limit` is a fault of vLLM, and
FAULTS has its current result. When a patch or a release fixes the fault, the test fails, so that the line gets changed.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge import environments, pins
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration
CLIENTS = Path(__file__).parent / "clients"
SECONDS = 600
DAILY = {"openai", "Codex", "Open WebUI"}  # vLLM's own requirement of openai is the newer one
WORKS, LIMIT = "works", "limit"
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "NO_PROXY": "127.0.0.1",
    "PYTHONPATH": "", "OPENAI_AGENTS_DISABLE_TRACING": "1",
}  # fmt: skip

_spec = importlib.util.spec_from_file_location("conversations", CLIENTS / "conversations.py")
conversations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(conversations)
SCRIPTS = conversations.SCRIPTS  # what conftest.py's server writes


def read_table():
    """Return client, feature → state and remark from the page's table, whose rows separate features by semicolons."""
    lines = (ROOT / "docs/reference/clients.md").read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.removeprefix("| ").removesuffix("|").split(" | ")]
        for line in lines
        if line.startswith("| ")
    ]
    return {
        (client, feature): (state, remark)
        for client, features, state, remark in rows[1:]
        if client != "---"
        for feature in features.split("; ")
    }


TABLE = read_table()
# Client, feature → the current result of the client's script.
FAULTS: dict[tuple[str, str], str] = {
    ("Codex", "tools: web_search, local_shell, apply_patch with a grammar"): r"400 .*tools\[2\]: type 'web_search'"
}


@pytest.fixture(scope="module")
def node_modules(large_folder):
    with large_folder("node") as folder:
        shutil.copytree(CLIENTS / "node", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
        command = ["npm", "ci", "--ignore-scripts", "--no-fund", "--no-audit"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
        yield folder


@pytest.fixture(scope="module")
def outcomes(scripted_server, request):
    """Client → feature → the error, or nothing, for clients whose tests run and whose programs are installed."""
    lines = [item.callspec.params["line"] for item in request.session.items if item.module is request.module
             and hasattr(item, "callspec")]  # fmt: skip
    clients = {client for client, _ in lines if not client.startswith("npm ") or shutil.which("npm")}
    environment = environments.Environment("clients")
    if clients - DAILY:
        environments.ensure(environment, pins.load())
    cues = {name: getattr(conversations, name) for name in ("ANSWER", "CALL", "JSON", "DONE")}
    turns = "50" if clients - DAILY else "8"
    processes = {}
    for name in sorted(clients):
        arguments = [scripted_server.url, scripted_server.model]
        if name.startswith("npm "):
            node_modules = request.getfixturevalue("node_modules")
            command = ["node", node_modules / f"{name.removeprefix('npm ')}.mjs", *arguments, json.dumps(cues)]
        else:
            python = sys.executable if name in DAILY else environment.python
            command = [python, CLIENTS / f"{re.sub(r'[^a-z]', '_', name.lower())}_client.py", *arguments]
        processes[name] = subprocess.Popen(
            command, env={**os.environ, **QUIET, "AGENT_TURNS": turns, "OPENAI_API_KEY": scripted_server.key},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    outcomes = {}
    for name, process in processes.items():
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0, err[-3000:]
        outcomes[name] = json.loads(out)
    return outcomes


def marked(line):
    """Add the marks of a client's line: when it runs and what it needs."""
    needs = [pytest.mark.needs("npm")] if line[0].startswith("npm ") else []
    return pytest.param(line, marks=needs if line[0] in DAILY else [*needs, pytest.mark.nightly])


@pytest.mark.parametrize("line", [marked(line) for line in TABLE], ids=[": ".join(line) for line in TABLE])
def test_the_table_says_what_a_client_gets(outcomes, line):
    client, feature = line
    state, remark = TABLE[line]
    outcome = outcomes[client][feature]
    if state == LIMIT:
        assert re.search(r"#\d+|Harmony", remark), "a limit has a number or a reason"
        assert re.search(FAULTS[line], outcome), f"no longer what it was: {outcome}"
    else:
        assert state in {WORKS, "patched"}
        assert outcome == ""


def test_the_table_has_every_feature(outcomes):
    features = {(client, feature) for client, features in outcomes.items() for feature in features}
    assert features == {line for line in TABLE if line[0] in outcomes}
    assert {line for line, (state, _) in TABLE.items() if state == LIMIT} == set(FAULTS)
