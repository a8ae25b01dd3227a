"""linux/arm64 on x86-64.

The Spark's image is cross-compiled on this machine. The first stages of a build as on a Spark, up to `toolchain`, run
in emulation. The image has one small module of FlashInfer. It is tested in emulation: its packages are imported, and
its validator judges a Spark's facts. The tests need 20 GB of disk and half an hour.
"""

import hashlib
import re
import zipfile

import pytest
from engine.test_cuda import BASE, command, look, require_tree, require_verdict

from sparkforge import pins
from sparkforge.core.paths import ROOT
from sparkforge.pins import index, locks
from sparkforge.pins.wheels import TargetMachine, choose, requirements

ARM64 = "docker.io/sparkforge-ci/debian:trixie-slim-arm64"
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LOOK = """
FROM toolchain AS look
RUN echo "machine $(uname -m), $(python3 --version), $(tini --version)" \\
    && .venv/bin/python -c "import httpx, pydantic, rich, uv; print('environment of ./inv')" \\
    && cd /tmp && echo '__global__ void twice(float *x) { x[threadIdx.x] *= 2; }' > twice.cu \\
    && home=$(dirname "$(find /opt/sparkforge/.sparkforge -path '*/nvidia/cu13/bin/nvcc')") \\
    && "$home/nvcc" -arch=sm_121a -cubin twice.cu && "$home/cuobjdump" -lelf twice.cubin
"""
TREE = "--mount=type=bind,from=audit,source=/opt/venv,target=/opt/venv"
PACKAGES = "/opt/venv/lib/python3.13/site-packages"
BYTECODE = f"""
RUN {TREE} mkdir /tmp/copy && cp -r {PACKAGES}/jinja2 /tmp/copy/ && rm -r /tmp/copy/jinja2/__pycache__ \\
    && PYTHONHASHSEED=0 python -m compileall --invalidation-mode unchecked-hash -q -j 1 \\
        -s /tmp/copy -p {PACKAGES} /tmp/copy/jinja2 \\
    && diff -r /tmp/copy/jinja2/__pycache__ {PACKAGES}/jinja2/__pycache__ && echo "bytecode is a Spark's own"
"""
# FlashInfer's generators use types of torch and two of its functions.
FAKE_TORCH = """
class Tensor: pass
class device: pass
class dtype:
    def __init__(self, name): self.name = name
    def __repr__(self): return "torch." + self.name
class cuda: is_available = staticmethod(lambda: False)
class version: cuda = None
class _C: _GLIBCXX_USE_CXX11_ABI = True
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return globals().setdefault(name, dtype(name))
"""


def fake_torch(folder):
    """Write a wheel in place of torch's CPU build, whose index not every machine reaches.

    Returns the hash of the pin and the hash of the wheel.
    """
    component = pins.load().component("embedded", "torch")
    name = next(name for name in component.files if "cp313-manylinux_2_28_x86_64" in name)
    info, files = f"torch-{component.version}.dist-info", {"torch/__init__.py": FAKE_TORCH}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: torch\nVersion: {component.version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp313-cp313-manylinux_2_28_x86_64\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return component.files[name], hashlib.sha256((folder / name).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def crossed(engine, gb10_sheet, tmp_path_factory):
    """The output of a build for a Spark and of commands in its tree."""
    folder = tmp_path_factory.mktemp("cross")
    (folder / "wheels").mkdir()
    pinned, fake = fake_torch(folder / "wheels")
    # The test engine has one base image per architecture and no multi-platform index, so the arm64 image is named.
    text = TEXT.replace(f"FROM {BASE} AS base-cuda", f"FROM {ARM64} AS base-cuda")
    text = text.replace("ENV UV_LINK_MODE=copy", "ENV UV_LINK_MODE=hardlink UV_NO_CACHE=1")  # half the disk
    copy = "COPY pins.toml trust.tom[l] ./\n"
    text = text.replace(copy, f"{copy}RUN sed -i s/{pinned}/{fake}/ pins.toml\n")
    text += "\nFROM scratch AS sheets\nFROM base AS look\nCOPY --from=audit /opt/image.json /opt/\n"
    text += look(TREE) + BYTECODE
    (folder / "Dockerfile").write_text(text)
    (folder / "gb10.json").write_text(gb10_sheet("spark"))
    *words, context = command(engine, "spark", folder / "Dockerfile", "look")
    words += ["--platform=linux/arm64", "--build-context", f"wheels={folder / 'wheels'}", context]
    yield engine.docker(*words, both=True)
    engine.docker("buildx", "prune", "--all", "--force", check=False)


def test_a_module_is_compiled_here_and_audited_as_a_sparks(crossed):
    assert re.search(r"1 modules in /kernels: \d+ of \d+ units compiled", crossed)
    assert "they are for aarch64" in crossed
    assert re.search(r"FlashInfer takes \['xqa_\S+\.so'\]", crossed)


def test_the_tree_is_of_aarch64_wheels_and_both_queues_and_is_imported_in_emulation(crossed):
    assert '"machine": "aarch64"' in crossed
    assert re.search(r"^#\d+ [\d.]+ bytecode is a Spark's own$", crossed, re.MULTILINE)
    require_tree(crossed, "spark")


def test_the_validator_of_the_image_judges_a_sparks_facts(crossed):
    require_verdict(crossed)


@pytest.fixture(scope="module")
def native(engine, tmp_path_factory):
    """The output of a build whose builder and target are both arm64, as on a Spark, up to `toolchain`, in emulation."""
    dockerfile = tmp_path_factory.mktemp("arm64") / "Dockerfile"
    dockerfile.write_text(TEXT + LOOK)
    arguments = ["buildx", "build", "--progress=plain", "--platform=linux/arm64", "--target=look"]
    arguments += ["--build-arg=BUILDPLATFORM=linux/arm64", "--build-arg=BUILDARCH=arm64"]
    arguments += ["--file", dockerfile, "--output=type=cacheonly", f"--secret=id=ca,src={engine.environment['CI_CA']}"]
    arguments += ["--build-context", f"{BASE}=docker-image://{ARM64}", ROOT]
    return engine.docker(*arguments, both=True)


def test_the_locked_packages_the_environment_and_the_compiler_run_on_the_processor_of_a_spark(native):
    assert re.search(r"machine aarch64, Python 3\.13\.\d+, tini version", native)
    assert re.search(r"^#\d+ [\d.]+ environment of ./inv$", native, re.MULTILINE)
    assert "twice.sm_121a.cubin" in native


def test_the_index_has_every_aarch64_wheel_of_the_spark_under_its_locked_hash():
    spark, chosen = TargetMachine("aarch64", (3, 13)), []
    with index.client() as http:
        for requirement, hashes in requirements(locks.lock_path("spark").read_text("utf-8"), spark):
            files = index.project_page(requirement.name, http).packages
            chosen.append(choose(requirement, hashes, files, spark).filename)
    assert all(name.endswith(".whl") for name in chosen)
    assert len([name for name in chosen if "aarch64" in name]) > 50
