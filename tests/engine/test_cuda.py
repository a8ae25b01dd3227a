"""The CUDA stages on amd64: locked toolchain, locked tree, patches, one module compiled and audited inside the build.

The whole image is not made here. What is made is every stage up to the audit, with the smallest set of kernels.
"""

import json
import re

import pytest

from sparkforge.paths import ROOT

BASE = re.search(r"^ARG BASE_CUDA=(\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[1]
IMPORTS = (
    "vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm", "vllm.model_executor.models.gpt_oss",
    "vllm.v1.attention.backends.flashinfer", "vllm.model_executor.layers.fused_moe.oracle.mxfp4",
    "vllm.v1.worker.gpu_worker", "flashinfer", "triton", "spark_mxfp4",
)  # fmt: skip
STUB = "/opt/venv/lib/python3.13/site-packages/nvidia/cu13/lib/stubs/libcuda.so"
# A driver that says 13.0 and that there is no device, so that what links against libcuda.so.1 can be imported.
LOOK = f"""
FROM audit AS look
COPY spark_mxfp4/ /opt/sparkforge/spark_mxfp4/
RUN {{ nm -D --defined-only {STUB} | grep -v cuDriverGetVersion \\
        | sed -n 's/.* T \\(cu.*\\)/int \\1() {{ return 100; }}/p'; \\
        echo 'int cuDriverGetVersion(int *v) {{ *v = 13000; return 0; }}'; }} > /tmp/driver.c \\
    && gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 /tmp/driver.c -o /tmp/libcuda.so.1 && cd /opt/sparkforge \\
    && LD_LIBRARY_PATH=/tmp /opt/venv/bin/python -c "import {", ".join(IMPORTS)}" \\
    && cat /opt/image.json && ls /opt/venv/lib/python3.13/site-packages/flashinfer/data/aot
"""


@pytest.fixture(scope="module")
def built(engine, tmp_path_factory):
    dockerfile = tmp_path_factory.mktemp("cuda") / "Dockerfile"
    dockerfile.write_text((ROOT / "Dockerfile").read_text(encoding="utf-8") + LOOK)
    words = [
        "buildx",
        "build",
        "--progress=plain",
        "--file",
        dockerfile,
        "--target",
        "look",
        "--output",
        "type=cacheonly",
    ]
    words += ["--build-context", f"{BASE}=docker-image://docker.io/sparkforge-ci/debian:trixie-slim"]
    words += ["--secret", f"id=ca,src={engine.environment['CI_CA']}", "--build-arg", "KERNEL_SET=trial", ROOT]
    try:
        yield engine.docker(*words, both=True)
    finally:  # 18 GB
        engine.docker("buildx", "prune", "--all", "--force", check=False)


def test_one_module_was_compiled_audited_and_put_where_flashinfer_takes_it(built):
    assert re.search(r"1 modules in /kernels: \d+ of \d+ units compiled", built)
    assert re.search(r"1 modules of FlashInfer: xqa_", built)


def test_both_queues_are_in_the_tree_and_every_file_was_hashed(built):
    assert "vllm-0.32.0: 3 patches" in built
    assert "flashinfer-0.7.0.post1: 3 patches" in built
    assert int(re.search(r"(\d+) files are as their wheels and patches say", built)[1]) > 20_000


def test_what_the_table_cuts_is_gone_and_serving_still_imports(built):
    assert "left out: flash-attention-3 (" in built
    text = "".join(
        line.partition(" ")[2].partition(" ")[2] for line in built.splitlines() if re.match(r"#\d+ [\d.]+ ", line)
    )
    assert json.loads(text[text.index('{  "device"') : text.index("}xqa_") + 1])["device"] == "cuda"
