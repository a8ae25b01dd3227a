"""The doctor and a real engine: a container that ended, its log, and what it left behind."""

import json
import os
import subprocess
import sys
import tarfile

import pytest

from sparkforge.core.errors import RefusalError
from sparkforge.core.paths import ROOT

IMAGE = os.environ.get("ENGINE_BASE", "sparkforge-ci/debian:bookworm-slim")  # tests/engine/engine.sh made it
PROJECT = "sparkforge-doctor"
FINDING = {"check": "memory-host", "status": "fail", "required": True, "evidence": "2 GiB", "fix": "ps aux", "doc": ""}
REFUSED = {"document": {"verdict": "refuse", "findings": [FINDING], "facts": {}}}
# Like the container's program: the refusal in the persistent folder, a message in the log, exit code 30.
SCRIPT = f"""mkdir /state && echo '{json.dumps(REFUSED)}' > /state/refused.json
echo 'FAIL memory-host  2 GiB'; echo '       next: ps aux'; echo 'CUDA error: invalid resource handle' >&2; exit 30"""


@pytest.fixture
def ended(engine):
    labels = {"project": PROJECT, "service": "vllm", "oneoff": "False"}
    arguments = [word for name, value in labels.items() for word in ("--label", f"com.docker.compose.{name}={value}")]
    arguments += ["--env", "SPARKFORGE_STATE=/state", "--env", "HF_TOKEN=hf_planted_secret", "--network", "none"]
    container = engine.docker("create", *arguments, IMAGE, "/bin/sh", "-c", SCRIPT).strip()
    engine.docker("start", "--attach", container, check=False)
    yield container
    engine.docker("rm", "--force", container)


def test_a_refused_container_is_reported_and_bundled(engine, ended, tmp_path):
    env = {**engine.environment, "COMPOSE_PROJECT_NAME": PROJECT, "SPARKFORGE_STATE": str(tmp_path / "state")}
    bundle = tmp_path / "support.tar.gz"
    arguments = [sys.executable, "-m", "invoke", "doctor", "--json", "--bundle", str(bundle)]
    result = subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == RefusalError.exit_code, result.stderr
    problems = json.loads(result.stdout)["problems"]
    assert [problem["id"] for problem in problems] == ["validation-check", "invalid-resource-handle", "container-ended"]
    sources = [problem["source"] for problem in problems[0]["places"]]
    assert sources == [f"{ended[:12]}:/state/refused.json", f"docker logs {ended[:12]}"]
    with tarfile.open(bundle) as archive:
        files = {member.name: archive.extractfile(member).read().decode() for member in archive.getmembers()}
    assert not [name for name, text in files.items() if "hf_planted_secret" in text]
    assert '"ExitCode": 30' in files["sparkforge-support/docker/inspect.json"]
    assert f"sparkforge-support/reports/{ended[:12]}_refused.json" in files
