"""The CUDA stages on amd64: locked toolchain, locked tree, patches, one module of FlashInfer and three of vLLM's
extensions compiled and audited inside the build.

The tests build every stage up to the audit, with the smallest set of kernels, but not the whole image. ENGINE_CUDA
selects the stacks: 1 for the default stack, or comma-separated names.
"""

import os
import re

import pytest

from sparkforge import pins
from sparkforge.core.paths import ROOT
from sparkforge.patching.series import queues

BASE = re.search(r"^FROM (\S+) AS base-cuda$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[1]
TABLE = pins.load()
NAMES = os.environ.get("ENGINE_CUDA", "1")
STACKS = [TABLE.default] if NAMES == "1" else NAMES.split(",")
IMPORTS = (
    "vllm.entrypoints.openai.api_server", "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.v1.engine.async_llm", "vllm.model_executor.models.gpt_oss",
    "vllm.v1.attention.backends.flashinfer", "vllm.v1.attention.backends.flash_attn", "vllm.vllm_flash_attn",
    "vllm.model_executor.layers.fused_moe.oracle.mxfp4", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu_worker",
    "flashinfer", "flashinfer.fused_moe", "triton", "torch._inductor.compile_fx", "spark_mxfp4",
    "pydantic_extra_types.language_code",
)  # fmt: skip
STUB = "/opt/venv/lib/python3.13/site-packages/nvidia/cu13/lib/stubs/libcuda.so"
AOT = "from flashinfer.jit import env; names = [one.name for one in env.FLASHINFER_AOT_DIR.iterdir()]; "
AOT += "print('FlashInfer takes', [one.path.name for name in names for one in env.get_aot_artifacts(name)])"
# Instructions that inspect a tree at /opt/venv: each RUN has `mount`, which may mount the tree from another stage.
LOOK = """
COPY sparkforge/ /opt/sparkforge/packages/sparkforge/
COPY spark_mxfp4/src/spark_mxfp4/ /opt/sparkforge/packages/spark_mxfp4/
COPY validate/ /opt/sparkforge/packages/validate/
ENV PYTHONPATH=/opt/sparkforge/packages PYTHONSAFEPATH=1 SPARKFORGE_ROOT=/opt/sparkforge
# A driver that says 13.0 and that there is no device, so that what links against libcuda.so.1 can be imported.
RUN {mount} {{ nm -D --defined-only {stub} | grep -v cuDriverGetVersion \\
        | sed -n 's/.* T \\(cu.*\\)/int \\1() {{ return 100; }}/p'; \\
        echo 'int cuDriverGetVersion(int *v) {{ *v = 13000; return 0; }}'; }} > /tmp/driver.c \\
    && gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 /tmp/driver.c -o /tmp/libcuda.so.1
ENV LD_LIBRARY_PATH=/tmp PATH=/opt/venv/bin:/usr/bin:/bin
RUN {mount} python -c "import {imports}; print('serving is imported')"
RUN {mount} python -c "import torch; print('cuDNN', torch.backends.cudnn.version())"
RUN {mount} python -c "{aot}"
RUN {mount} --mount=type=bind,from=sheets,target=/mnt/sheets \\
    python -m validate --profile spark --no-deep --facts /mnt/sheets/gb10.json
RUN {mount} du -sm /opt/venv && du -sm --exclude=/opt --exclude=/root --exclude=/proc --exclude=/sys / \\
    && cat /opt/image.json
"""


def look(mount=""):
    """Return the instructions that inspect a tree, which `mount` provides."""
    return LOOK.format(mount=mount, stub=STUB, imports=", ".join(IMPORTS), aot=AOT)


def command(engine, stack, dockerfile, target, **arguments):
    """Return the words of a build of the stack's stage `target`."""
    words = ["buildx", "build", "--progress=plain", "--file", dockerfile, "--target", target, "--output=type=cacheonly"]
    words += ["--build-context", f"{BASE}=docker-image://docker.io/sparkforge-ci/debian:trixie-slim"]
    words += ["--build-context", f"sheets={dockerfile.parent}", "--build-arg", f"STACK={stack}"]
    words += ["--secret", f"id=ca,src={engine.environment['CI_CA']}", "--build-arg", "KERNEL_SET=trial"]
    return [*words, *(f"--build-arg={name}={value}" for name, value in arguments.items()), ROOT]


@pytest.fixture(scope="module", params=STACKS)
def stack(request):
    return request.param


@pytest.fixture(scope="module")
def dockerfile(engine, stack, gb10_sheet, tmp_path_factory):
    written = tmp_path_factory.mktemp(stack) / "Dockerfile"
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    written.write_text(f"{text}\nFROM scratch AS sheets\nFROM audit AS look\n{look()}")
    written.with_name("gb10.json").write_text(gb10_sheet(stack))
    yield written
    engine.docker("buildx", "prune", "--all", "--force", check=False)  # 18 GB


@pytest.fixture(scope="module")
def built(engine, stack, dockerfile):
    source = {"VLLM_FROM": "source", "VLLM_TARGETS": "cumem_allocator,spinloop,fs_io_C"}
    return engine.docker(*command(engine, stack, dockerfile, "look", **source), both=True)


def test_one_module_was_compiled_audited_and_put_where_flashinfer_takes_it(built):
    assert re.search(r"1 modules in /kernels: \d+ of \d+ units compiled", built)
    assert re.search(r"1 modules of FlashInfer: xqa_", built)
    assert re.search(r"FlashInfer takes \['xqa_\S+\.so'\]", built)


def require_tree(output, stack):
    """Assert that both queues are in the tree, that every file was hashed, and that serving and cuDNN are imported."""
    for _, queue in queues(TABLE, stack):
        assert f'"{queue.upstream}-{queue.version}": "{queue.sha256}"' in output
    files, wheels = re.search(r"(\d+) files match their wheels, (\d+) wheels are those", output).groups()
    assert int(files) > 20_000
    assert wheels == "2"
    cudnn = re.search(r"^#\d+ [\d.]+ cuDNN (\d+)$", output, re.MULTILINE)[1]
    assert int(cudnn) >= 91500  # 9.15, which torch requests
    assert re.search(r"^#\d+ [\d.]+ serving is imported$", output, re.MULTILINE)


def require_verdict(output):
    """Assert that the validator of the image lets a Spark serve."""
    assert "ok   moe-backend" in output
    assert "serve: the server may start" in output


def test_both_queues_are_in_the_tree_every_file_was_hashed_and_files_that_the_table_removes_are_gone(stack, built):
    require_tree(built, stack)
    for name in ("flash-attention-3", "tilelang", "cudnn-engines"):
        assert f"left out: {name} (" in built


def test_extensions_of_vllm_were_compiled_and_laid_over_the_wheels(built):
    assert re.search(r"cumem_allocator, spinloop, fs_io_C; \d+ of \d+ units compiled", built)
    assert "site-packages: libraries replaced" in built


def test_the_validator_of_the_image_judges_a_sparks_facts(built):
    require_verdict(built)


def test_all_of_vllm_from_source_names_the_repository_that_is_missing(engine, stack, dockerfile, tmp_path):
    """Without a git host the stage ends at its sources; the error says what CUTLASS is for and how to get it."""
    (tmp_path / "README").write_text("no checkout of CUTLASS\n")
    arguments = command(engine, stack, dockerfile, "vllm-source", VLLM_FROM="source")
    words = (*arguments[:-1], "--build-context", f"bundle={tmp_path}", arguments[-1])
    output = engine.docker(*words, both=True, check=False)
    assert re.search(r"1 of vLLM's repositories are missing", output)
    assert "there is no git checkout /mnt/bundle/cutlass" in output
    assert "./inv bundle.unpack" in output
