"""A real Docker engine, on which the product's own files run unmodified.

`tests/engine/run` starts a private engine (engine.sh) and these tests. `ci.yml` provides the images that would come
from a registry as inputs of the build; it does not change the services' hardening.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_for

from lab.daily_page import RUNS
from sparkforge.bench.context import facts
from sparkforge.core.files import write_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT

HERE = ROOT / "tests/engine"
PROJECT = os.environ.get("ENGINE_PROJECT", "sparkforge-test")  # choose another name if two runs share an engine


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(3600))
            if not os.environ.get("SPARKFORGE_ENGINE"):  # never a user's own engine
                item.add_marker(pytest.mark.skip(reason="needs a private Docker engine: sudo tests/engine/run"))


@dataclass
class Engine:
    """The engine of DOCKER_HOST, through a user's docker command."""

    environment: dict

    def docker(self, *arguments, check=True, env=None, both=False):
        command, environment = ["docker", *map(str, arguments)], {**self.environment, **(env or {})}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        said = f"{' '.join(command)}\n{result.stdout[-3000:]}{result.stderr[-5000:]}"
        assert not check or result.returncode == 0, said
        return result.stdout + result.stderr if both else result.stdout

    def inspect(self, name):
        return json.loads(self.docker("inspect", name))[0]


@dataclass
class Verbs:
    """The verbs of a checkout, run as a user runs them, with an environment and the port of their server."""

    engine: Engine
    environment: dict
    port: int
    path: Path = ROOT

    def start(self, *arguments, **more):
        return subprocess.Popen(
            [sys.executable, "-m", "sparkforge.cli", *map(str, arguments)], cwd=self.path,
            env={**self.environment, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def inv(self, *arguments, **more):
        """Return the exit code and the output of a command."""
        process = self.start(*arguments, **more)
        out, err = process.communicate(timeout=3000)
        assert "Traceback" not in out + err, err
        return process.returncode, out + err

    def good(self, *arguments, **more):
        code, said = self.inv(*arguments, **more)
        assert code == 0, said
        return said


@pytest.fixture(scope="session")
def engine():
    ca = os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt"
    wheels = os.environ.get("CI_WHEELS") or os.environ.get("PIP_FIND_LINKS") or str(HERE)
    shared_engine = Engine({**os.environ, "CI_CA": ca, "CI_WHEELS": wheels, "COMPOSE_PROGRESS": "plain"})
    shared_engine.docker("version")
    return shared_engine


@dataclass
class Project:
    """A Compose project of our own files plus additions, on its own ports."""

    engine: Engine
    files: tuple
    env: dict
    name: str = PROJECT

    def compose(self, *arguments, check=True):
        files = [word for name in self.files for word in ("-f", ROOT / name)]
        return self.engine.docker("compose", "-p", self.name, *files, *arguments, env=self.env, check=check)

    def container(self, service="vllm"):
        return self.compose("ps", "--all", "--quiet", service).strip()

    def state(self, service="vllm"):
        return self.engine.inspect(self.container(service))["State"]

    def logs(self, service="vllm"):
        return self.compose("logs", "--no-color", "--no-log-prefix", service)

    def wait_healthy(self, service="vllm", seconds=900):
        def healthy():
            state = self.state(service)
            assert state["Status"] in ("running", "created", "restarting"), self.logs(service)[-6000:]
            return state.get("Health", {}).get("Status") == "healthy"

        def why():
            return f"{service} is not healthy: {self.state(service)}\n{self.logs(service)[-6000:]}"

        wait_for(healthy, seconds, why, pause=1)


@dataclass
class Figures:
    """Times that a user waits, in seconds, with the machine's load at the start of each."""

    repeats: int
    times: dict = field(default_factory=dict)

    @contextmanager
    def measured(self, name):
        load, began = os.getloadavg()[0], time.monotonic()
        yield
        seconds = round(time.monotonic() - began, 1)
        self.times.setdefault(name, []).append({"seconds": seconds, "load": round(load, 1)})
        print(f"{name}: {seconds} s, load {load:.1f}")


@pytest.fixture(scope="session")
def all_times():
    """Collect the times of every test; with ENGINE_FIGURES=FILE write them and the machine's facts to that file."""
    times = {}
    yield times
    if times and (file := os.environ.get("ENGINE_FIGURES")):
        write_json(Path(file), {"machine": facts(), "seconds_to": times})


@pytest.fixture
def figures(all_times):
    """Measure once; with ENGINE_FIGURES=FILE three times. A second try starts again; incomplete times are left out."""
    measured = Figures(RUNS if os.environ.get("ENGINE_FIGURES") else 1)
    yield measured
    all_times.update({name: runs for name, runs in measured.times.items() if len(runs) == measured.repeats})


@pytest.fixture(scope="session")
def first_token():
    """Return a function that waits for the first token of a server; `check` raises if the server has failed."""

    def wait(port, model, check=lambda: None):
        endpoint = Endpoint(f"http://127.0.0.1:{port}", model, key="")
        wait_for(lambda: endpoint.healthy() or check(), 900, lambda: "no server became healthy", pause=0.25)
        return endpoint.first_token(60)

    return wait


@pytest.fixture(scope="session")
def compose_project(engine):
    """Return a function that makes a project from Compose files and variables."""
    return partial(Project, engine)


@pytest.fixture(scope="session")
def project(engine, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    models.chmod(0o755)  # pytest makes it for its owner alone, and the container is another user
    env = {"PORT": "18000", "PROMETHEUS_PORT": "19090", "SPARKFORGE_MODELS": str(models)}
    env |= {"SPARKFORGE_STACK": "embedded", "BUILDX_GIT_LABELS": "1"}
    running_project = Project(engine, ("docker-compose.yml", "tests/engine/ci.yml"), env)
    if not os.environ.get("ENGINE_BUILT"):  # for developers of these tests: the image is already built
        running_project.compose("build", "vllm")
    yield running_project
    profiles = ("--profile", "monitor", "--profile", "bench")
    running_project.compose(*profiles, "down", "--volumes", "--timeout", "20", check=False)


@pytest.fixture(scope="session")
def served(project):
    """The project with a running server, shared by test_embedded, test_monitor and test_stop."""
    project.compose("up", "--detach", "--no-build", "vllm")
    project.wait_healthy()
    return project
