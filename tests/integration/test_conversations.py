"""What people's clients get from real vLLM and the scripted checkpoint: the table of docs/reference/clients.md.

Each client's script (tests/integration/clients) runs all of its features in one process, in the environment that has
the client. A line that says `limit` is vLLM's fault, and FAULTS has what comes of it today: when a patch or a release
cures it, the test fails and says so, so that the line changes.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge import environments, pins
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration
CLIENTS = Path(__file__).parent / "clients"
SECONDS = 600
WORKS, LIMIT = "works", "limit"
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "NO_PROXY": "127.0.0.1",
    "PYTHONPATH": "", "OPENAI_API_KEY": "none",
}  # fmt: skip

_spec = importlib.util.spec_from_file_location("conversations", CLIENTS / "conversations.py")
conversations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(conversations)
SCRIPTS = conversations.SCRIPTS  # what conftest.py's server writes


def read_table():
    """Client, feature → state and remark, from the page's table."""
    lines = (ROOT / "docs/reference/clients.md").read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.removeprefix("| ").removesuffix("|").split(" | ")]
        for line in lines
        if line.startswith("| ")
    ]
    return {(client, feature): (state, remark) for client, feature, state, remark in rows[1:] if client != "---"}


TABLE = read_table()
# Client, feature → what the client's script says today.
FAULTS: dict[tuple[str, str], str] = {
    ("openai", "Responses: log probabilities"): "400 .*logprobs are not supported with gpt-oss models",
}


@pytest.fixture(scope="module")
def outcomes(scripted_server):
    """Client → feature → what went wrong, or nothing."""
    environment = environments.Environment("clients")
    environments.ensure(environment, pins.load())
    names = sorted({client for client, _ in TABLE})
    processes = {}
    for name in names:
        python = sys.executable if name == "openai" else environment.python  # vLLM's own requirement is the newer one
        command = [python, CLIENTS / f"{name.lower()}_client.py", scripted_server.url, scripted_server.model]
        processes[name] = subprocess.Popen(
            command, env={**os.environ, **QUIET}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    outcomes = {}
    for name, process in processes.items():
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0, err[-3000:]
        outcomes[name] = json.loads(out)
    return outcomes


@pytest.mark.parametrize("line", TABLE, ids=": ".join)
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
    assert {(client, feature) for client, features in outcomes.items() for feature in features} == set(TABLE)
    assert {line for line, (state, _) in TABLE.items() if state == LIMIT} == set(FAULTS)


def test_the_page_has_the_number_of_its_lines():
    page = (ROOT / "docs/reference/clients.md").read_text(encoding="utf-8")
    assert f"{len(TABLE)} lines of this table, {len(FAULTS)} of them limits" in page
