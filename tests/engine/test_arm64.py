"""The thin stages for linux/arm64, emulated: base, environment of ./inv, and the compiler, making code for 12.1a.

What weighs gigabytes is not installed: the index is asked whether it has each wheel under its locked hash.
"""

import re

import pytest

from sparkforge.core.paths import ROOT
from sparkforge.pins import index, locks
from sparkforge.pins.wheels import TargetMachine, choose, requirements

BASE = re.search(r"^FROM (\S+) AS base-cuda$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[1]
LOOK = """
FROM toolchain AS look
RUN echo "machine $(uname -m), $(python3 --version), $(tini --version)" \\
    && .venv/bin/python -c "import httpx, pydantic, rich, uv; print('environment of ./inv')" \\
    && cd /tmp && echo '__global__ void twice(float *x) { x[threadIdx.x] *= 2; }' > twice.cu \\
    && home=$(dirname "$(find /opt/sparkforge/.sparkforge -path '*/nvidia/cu13/bin/nvcc')") \\
    && "$home/nvcc" -arch=sm_121a -cubin twice.cu && "$home/cuobjdump" -lelf twice.cubin
"""


@pytest.fixture(scope="module")
def built(engine, tmp_path_factory):
    dockerfile = tmp_path_factory.mktemp("arm64") / "Dockerfile"
    dockerfile.write_text((ROOT / "Dockerfile").read_text(encoding="utf-8") + LOOK)
    arguments = ["buildx", "build", "--progress=plain", "--platform=linux/arm64", "--target=look"]
    arguments += ["--file", dockerfile, "--output=type=cacheonly", f"--secret=id=ca,src={engine.environment['CI_CA']}"]
    arguments += ["--build-context", f"{BASE}=docker-image://docker.io/sparkforge-ci/debian:trixie-slim-arm64", ROOT]
    return engine.docker(*arguments, both=True)


def test_the_locked_packages_install_on_the_processor_of_a_spark(built):
    assert re.search(r"machine aarch64, Python 3\.13\.\d+, tini version", built)


def test_the_environment_of_inv_is_made_of_locked_aarch64_wheels(built):
    assert re.search(r"^#\d+ [\d.]+ environment of ./inv$", built, re.MULTILINE)


def test_the_locked_compiler_runs_there_and_makes_code_for_a_spark(built):
    assert "twice.sm_121a.cubin" in built


def test_the_index_has_every_aarch64_wheel_of_the_spark_under_its_locked_hash():
    spark, chosen = TargetMachine("aarch64", (3, 13)), []
    with index.client() as http:
        for requirement, hashes in requirements(locks.lock_path("spark").read_text("utf-8"), spark):
            files = index.project_page(requirement.name, http).packages
            chosen.append(choose(requirement, hashes, files, spark).filename)
    assert all(name.endswith(".whl") for name in chosen)
    assert len([name for name in chosen if "aarch64" in name]) > 50
