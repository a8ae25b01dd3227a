"""The development image of the stack for a Spark, on amd64: `./inv dev.build vllm` compiles edited files.

The checkout is upstream's sdist with the queue. No whole extension is linked, because CUTLASS is only available by git,
and a hundred CUDA units take hours on two cores.
"""

import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_for

from sparkforge import pins
from sparkforge.core.paths import ROOT
from sparkforge.patching.series import Queue
from sparkforge.sources import trees

DEV = ("docker-compose.dev.yml", "tests/engine/ci-dev-cuda.yml")
UNIT = "csrc/layernorm_kernels.cu"  # its peak was measured: 0.85 GB


@pytest.fixture(scope="module")
def dev(engine, compose_project, tmp_path_factory):
    checkout = tmp_path_factory.mktemp("vllm") / "vllm"
    component = pins.load().component("spark", "vllm")
    (sdist,) = [name for name in component.files if name.endswith(trees.ARCHIVE)]
    trees.unpack_archive(component, sdist)
    shutil.copytree(trees.tree_folder(component, sdist), checkout)
    Queue.load(ROOT / "patches" / component.patches).apply_to(checkout)
    for folder, _folders, _files in os.walk(checkout):  # uid 1000 of the container puts links there
        Path(folder).chmod(0o777)
    # The default of 40 GiB is for a Spark; here the limit must keep the jobs below this machine's memory.
    variables = {"VLLM_SRC": str(checkout), "SPARKFORGE_STACK": "spark", "SPARKFORGE_MEMORY": "8g"}
    project = compose_project(DEV, variables)
    project.compose("build", "dev")
    project.compose("up", "--detach", "--no-build", "dev")
    project.checkout = checkout
    log = partial(project.logs, "dev")
    wait_for(lambda: "triton_kernels: " in log(), 300, log, pause=0.5)  # the last line of a start's output
    yield project
    project.compose("down", "--volumes", "--timeout", "5", check=False)
    engine.docker("rmi", "sparkforge/vllm:dev", check=False)  # 9 GB, and another stack's has the same name


def build(dev, *arguments):
    """Run dev.build in the container; return its output, with the exit code at the end."""
    line = f"./inv dev.build vllm {' '.join(arguments)} 2>&1; echo code $?"
    return dev.compose("exec", "-T", "dev", "sh", "-c", line)


def test_an_edited_cuda_unit_is_compiled_for_the_sparks_architecture_within_memory_and_audited(dev):
    source = dev.checkout / UNIT
    text = source.read_text()
    source.write_text(f"// edited\n{text}")
    said = build(dev, "--units", "changed")
    assert said.rstrip().endswith("code 0"), said
    assert re.search(r"1 units, at most [12] at once within [0-8]\.\d GB", said)
    assert re.search(rf"_C_stable_libtorch/{UNIT}\.o: compiled \([\d.]+ s, [\d.]+ GB", said)
    # vLLM's CMake compiles 12.1a as 12.0, which a 12.1 can load: docs/concepts/vllm-extensions.md.
    kernels = re.search(r"1 of 1 units compiled, .*; 1 for sm_120; (\d+) kernels audited", said)[1]
    assert int(kernels) > 50
    assert "nothing was linked" in said
    assert "0 of 1 units compiled" in build(dev, "--units", UNIT)
    source.write_text(f"#error edited\n{text}")
    broken = build(dev, "--units", "changed")
    assert "#error edited" in broken
    assert not broken.rstrip().endswith("code 0")
    source.write_text(text)
    assert "there is no edited unit" in build(dev, "--units", "changed")


def test_an_edited_target_is_compiled_linked_audited_and_put_into_the_checkout(dev):
    source, library = dev.checkout / "csrc/spinloop.cpp", dev.checkout / "vllm/spinloop.abi3.so"
    assert library.is_symlink()
    source.write_text(f"// edited\n{source.read_text()}")
    said = build(dev, "--targets", "spinloop")
    assert said.rstrip().endswith("code 0"), said
    assert "spinloop; 1 of 1 units compiled" in said
    assert "vllm/spinloop.abi3.so: compiled here" in said
    assert (library.is_file(), library.is_symlink()) == (True, False)


def test_a_missing_repository_is_named_with_every_way_to_get_it(dev):
    said = build(dev, "--targets", "_moe_C_stable_libtorch", "--sources", "/src/triton")
    assert "1 of vLLM's repositories are missing" in said
    assert "cutlass (v4.7.1)" in said
