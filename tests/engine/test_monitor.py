"""The profile `monitor`: Prometheus scrapes server and validator, and can answer every query of the dashboard.

Prometheus and node_exporter come from Debian's packages in otherwise empty images, because a machine without a registry
cannot pull the pinned images. Debian has no package of Grafana, so the dashboard's queries are run but nothing is
drawn.
"""

import http.client
import json
import os
import shutil
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from waiting import wait_for

from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT

PROMETHEUS = "http://127.0.0.1:19090"
URL = "http://127.0.0.1:18000"
BINARIES = {"prometheus": "prometheus", "node-exporter": "prometheus-node-exporter"}
IMAGE = """FROM sparkforge-ci/debian:bookworm-slim
COPY program /program
RUN mkdir /prometheus && chown 65534 /prometheus
ENTRYPOINT ["/program"]
"""
BOARD = json.loads((ROOT / "deploy/grafana/dashboards/vllm.json").read_text(encoding="utf-8"))
EXPRESSIONS = sorted({target["expr"] for panel in BOARD["panels"] for target in panel["targets"]})


def ask(expression):
    query = urllib.parse.urlencode({"query": expression.replace("$__rate_interval", "1m")})
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/query?{query}", timeout=60) as reply:
        return json.loads(reply.read())["data"]["result"]


def answered(expression):
    if "status=~" in expression:  # no result is the good case, but the series must exist
        expression = "sparkforge_validation_check"
    return ask(expression)


def settled():
    """Whether Prometheus runs and answers every query; a rate needs two scrapes."""
    try:
        return len(ask("up == 1")) == 2 and all(map(answered, EXPRESSIONS))
    except (OSError, http.client.HTTPException):  # also a published port that has no listener yet
        return False


@pytest.fixture(scope="module")
def monitored(served, tmp_path_factory):
    programs = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sparkforge/engine/root/usr/bin"
    env = dict(served.env)
    for service, binary in BINARIES.items():
        folder = tmp_path_factory.mktemp(service)
        shutil.copy(programs / binary, folder / "program")
        (folder / "Dockerfile").write_text(IMAGE)
        served.engine.docker("build", "--tag", f"sparkforge-ci/{service}:test", folder)
        env[service.upper().replace("-", "_") + "_IMAGE"] = f"sparkforge-ci/{service}:test"
    project = type(served)(served.engine, served.files, env)
    project.compose("--profile", "monitor", "up", "--detach", "--no-build", "prometheus", "node-exporter")
    list(Endpoint(URL, "tiny-gpt-oss", key="").stream_chat([{"role": "user", "content": "Hello"}], 16))
    wait_for(settled, 300, lambda: f"no answer: {[text for text in EXPRESSIONS if not answered(text)]}", pause=1)
    return project


def test_prometheus_reads_its_configuration_and_both_targets(monitored):
    assert {series["metric"]["job"] for series in ask("up == 1")} == {"vllm", "validation"}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_query_of_the_dashboard_has_an_answer(monitored, expression):
    assert answered(expression), expression


def test_the_alerts_are_loaded(monitored):
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/rules", timeout=60) as reply:
        rules = json.loads(reply.read())["data"]["groups"][0]["rules"]
    assert {rule["name"] for rule in rules} == {"ServerDown", "ValidationNotGreen", "CacheFull"}
    assert all(rule["health"] == "ok" for rule in rules)
