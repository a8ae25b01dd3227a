"""The image on NVIDIA's base: refused by name where that cannot be pulled, and built on a stand-in as far as that goes.

The stand-in is Debian 13 with Python 3.13, and named so; the lock wants 3.12, which NVIDIA's image has, or newer. It
has neither torch nor CUDA: what it shows is that our part of the Dockerfile runs, up to the point where vLLM is
compiled. ENGINE_NGC=1, for its lock of 150 packages is installed.
"""

import os
import re

import pytest

from sparkforge import pins
from sparkforge.core import docker
from sparkforge.core.paths import ROOT

STACK = "ngc-25.12"
BASE = re.search(r"^FROM (\S+) AS base-ngc$", (ROOT / "Dockerfile.ngc").read_text(encoding="utf-8"), re.MULTILINE)[1]
STAND_IN = "sparkforge-ci/stand-in-for-nvidias-image"


def test_compose_takes_the_service_of_each_stack(engine):
    for stack, table in pins.load().stacks.items():
        if table.image:
            output = engine.docker("compose", "config", "--images", "vllm", env={"SPARKFORGE_STACK": stack})
            assert output.split() == [f"sparkforge/vllm:{stack}"]
    output = engine.docker("compose", "config", env={"SPARKFORGE_STACK": "none"}, both=True, check=False)
    assert re.search(r'service "(bench-)?none" not found in deploy/stacks.yml', output)


def test_a_base_that_cannot_be_pulled_is_refused_by_name(engine):
    output = engine.docker("compose", "build", "vllm", env={"SPARKFORGE_STACK": STACK}, both=True, check=False)
    error = docker.explained(output[-docker.LOG_END :], "docker compose ended with code 1", "less log")
    assert (error.code, error.exit_code) == ("engine.base", 62)
    assert BASE.partition("@")[0] in error.why


@pytest.mark.skipif(not os.environ.get("ENGINE_NGC"), reason="installs 150 packages: ENGINE_NGC=1 tests/engine/run")
def test_on_a_stand_in_it_is_built_until_vllms_repositories_are_missing(engine, tmp_path):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/README").write_text("no checkout\n")
    ca = f"id=ca,src={engine.environment['CI_CA']}"
    debian = re.search(r"^FROM (\S+) AS base-cuda$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    arguments = ["buildx", "build", "--progress=plain", "--secret", ca]
    base = ["--build-context", f"{debian}=docker-image://docker.io/sparkforge-ci/debian:trixie-slim"]
    engine.docker(*arguments, *base, "--build-arg=STACK=spark", "--target=tools", "--tag", STAND_IN, "--load", ROOT)
    arguments += ["--file", ROOT / "Dockerfile.ngc", "--target=vllm", "--output=type=cacheonly"]
    arguments += ["--build-context", f"{BASE}=docker-image://docker.io/{STAND_IN}"]
    output = engine.docker(*arguments, "--build-context", f"bundle={tmp_path / 'bundle'}", ROOT, both=True, check=False)
    engine.docker("image", "rm", STAND_IN, check=False)
    assert re.search(r"3 of vLLM's repositories are missing", output), output[-6000:]
    for name in ("cutlass", "triton-kernels", "flash-attention"):
        assert f"there is no git checkout /mnt/bundle/{name}" in output
