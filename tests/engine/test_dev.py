"""The development image with only its own Compose file: start, mounted checkouts, and the commands that it advises."""

import os
import subprocess
import sys
from functools import partial

import advice
import pytest
from waiting import wait_for

from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT

DEV = ("docker-compose.dev.yml", "docker-compose.dev.cpu.yml", "tests/engine/ci-dev.yml")
VOLUME = "/var/cache/sparkforge"
MODULE = f"{VOLUME}/{{key}}/.cache/flashinfer/0.7.0.post1/121a/cached_ops/{{name}}"


@pytest.fixture(scope="module")
def dev(engine, compose_project, tmp_path_factory):
    checkout = tmp_path_factory.mktemp("vllm")
    (checkout / "vllm").mkdir()
    (checkout / "csrc").mkdir()
    (checkout / "vllm/__init__.py").write_text("here = 'the checkout'\n")
    (checkout / "csrc/a.cu").write_text("one")
    kernels = tmp_path_factory.mktemp("triton")
    (kernels / "python/triton_kernels/triton_kernels").mkdir(parents=True)
    (kernels / "python/triton_kernels/triton_kernels/__init__.py").write_text("here = 'the kernels'\n")
    kernels.chmod(0o755)
    for folder in (checkout, checkout / "vllm"):
        folder.chmod(0o777)
    env = {"VLLM_SRC": str(checkout), "TRITON_KERNELS_SRC": str(kernels), "DEV_PORT": "18100"}
    project = compose_project(DEV, env)
    if not os.environ.get("ENGINE_BUILT"):
        project.compose("build", "dev")
    project.compose("up", "--detach", "--no-build", "dev")
    project.checkout = checkout
    yield project
    project.compose("--profile", "serve", "down", "--volumes", "--timeout", "5", check=False)


LAST = "triton_kernels: "  # the report's last line begins so


def wait_for_log(dev, text=LAST, times=1, seconds=300):
    """Wait until the log contains `text` the given number of times; return the log."""
    log = partial(dev.logs, "dev")
    wait_for(lambda: log().count(text) >= times, seconds, log, pause=0.5)
    return log()


def restarted(dev):
    """Restart the container; return its new report."""
    before = wait_for_log(dev)
    dev.compose("restart", "--timeout", "1", "dev")
    return wait_for_log(dev, times=before.count(LAST) + 1).removeprefix(before)


def inside(dev, *arguments, check=True):
    wait_for_log(dev)
    return dev.compose("exec", "-T", "dev", *arguments, check=check)


def test_the_mounted_checkouts_are_what_python_imports(dev):
    output = inside(dev, "python", "-c", "import vllm, triton_kernels as k; print(vllm.here, '+', k.here)")
    assert output.strip() == "the checkout + the kernels"


def test_a_changed_native_source_is_noticed_at_the_next_start(dev):
    (dev.checkout / "csrc/a.cu").write_text("two")
    change = "1 native sources changed, such as csrc/a.cu"
    assert change in restarted(dev)
    inside(dev, "./inv", "dev.build", "vllm", "--accept")
    assert change not in restarted(dev)


def test_every_advised_command_runs_where_it_is_printed(dev):
    names = sorted({command.command for command in advice.commands()})
    assert {"dev.build", "patch", "clean-cache", "build.kernels"} <= set(names)
    # As `./inv NAME --help` does, in one process.
    code = "import sys; from sparkforge.cli import program; [program.run([name, '--help']) for name in sys.argv[1:]]"
    helped = inside(dev, ".venv/bin/python", "-c", code, *names)
    assert [name for name in names if f"Usage: ./inv {name} " not in helped] == []
    inside(dev, "./inv", "clean-cache", "--list")
    missing = 'for name; do command -v "$name" > /dev/null || echo "$name"; done'
    assert inside(dev, "sh", "-c", missing, "-", "less", "pip", "git", "ninja") == ""
    assert inside(dev, "pip", "--version").strip().endswith("(python 3.11)")


def test_a_build_that_cannot_be_made_here_is_refused_in_three_parts(dev):
    result = dev.compose("exec", "-T", "dev", "sh", "-c", "./inv dev.build vllm 2>&1; echo code $?")
    assert "the stack embedded compiles nothing" in result
    assert result.strip().endswith("code 2")


def test_one_server_starts_beside_the_workbench_and_answers(engine, compose_project):
    """Without a checkout the installed, patched vLLM serves the tiny model."""
    project = compose_project(DEV, {"DEV_PORT": "18100"})
    project.compose("--profile", "serve", "up", "--detach", "--no-build", "serve")
    ports = project.compose("--profile", "serve", "ps", "--format", "{{.Service}} {{.Publishers}}")
    assert ports.count("127.0.0.1") == 1

    def healthy():
        assert project.state("serve")["Running"], project.logs("serve")[-3000:]
        return Endpoint("http://127.0.0.1:18100").healthy()

    wait_for(healthy, 900, lambda: project.logs("serve")[-3000:], pause=1)


@pytest.fixture
def volume(engine, project):
    """Compiled modules of two images in the volume of the test's project."""
    modules = [MODULE.format(key=key, name=name) for key, name in
               (("0123", "fused_moe_120"), ("4567", "fused_moe_90"), ("4567", "page"))]  # fmt: skip
    script = 'for path; do mkdir -p "$path"; touch "$path/$(basename "$path").so"; done'
    mount = f"{project.name}_cache:{VOLUME}"
    project.compose("create", "--no-build", "vllm")  # creates the volume from the image
    engine.docker("run", "--rm", "--volume", mount, "--entrypoint", "sh", "sparkforge/vllm:embedded", "-c", script, "-",
                  *modules)  # fmt: skip
    return mount


def test_the_hosts_command_cleans_the_containers_volume(volume, engine, project):
    files = ":".join(str(ROOT / name) for name in project.files[1:])
    env = {**engine.environment, **project.env, "COMPOSE_PROJECT_NAME": project.name,
           "SPARKFORGE_COMPOSE_FILES": files}  # fmt: skip

    def inv(*arguments):
        command = [sys.executable, "-m", "sparkforge.cli", *arguments]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    listed = inv("clean-cache", "--list", "--container")
    assert listed.returncode == 0, listed.stderr
    assert listed.stderr.count("it has no build.ninja") == 3
    cleaned = inv("clean-cache", "--container", "--module", "fused_moe_*")
    assert "removed 2 modules" in cleaned.stderr, cleaned.stderr
    refused = inv("clean-cache", "--container", "--module", "fused_moe_*")
    assert refused.returncode == 2
    assert "next: ./inv clean-cache --container --list   # on the host" in refused.stderr
