"""The smallest set of kernels through `./inv build.kernels`: killed, resumed, loaded without a compiler."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from sparkforge import environments
from sparkforge.compile import toolchain
from sparkforge.compile.flashinfer import sets
from sparkforge.core.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.needs("c++")]
TABLE = sets.load("0.7.0.post1")
(SMALL,) = TABLE.chosen("trial")
# Loads a module as a server does: by FlashInfer's JitSpec, from its own generator's specification.
SERVER = """
import json, os, runpy, sys
specs = runpy.run_path(sys.argv[1])
specs["enter"](specs["Path"](specs["probe"]()["package"]))
request = json.load(sys.stdin)
resolve = specs["resolve"]
arguments = {key: resolve(value) for key, value in request["arguments"].items()}
print(resolve("@" + request["generator"])(**arguments).build_and_load().xqa_wrapper)
"""
# Wraps the real nvcc, so that it can be disabled: it then still prints its version, but records each call and fails.
NVCC = '#!/bin/sh\nif [ -e {flag} ] && [ "$1" != --version ]; then echo "$@" >> {calls}; exit 1; fi\nexec {real} "$@"\n'


@pytest.fixture(scope="module")
def site(large_folder):
    """An output folder, the environment's interpreter, and a CUDA_HOME whose nvcc can be disabled."""
    with large_folder("kernels") as base:
        real, home = toolchain.install()[0] / toolchain.HOME, base / "cuda"
        (home / "bin").mkdir(parents=True)
        for entry in [*real.iterdir(), *(real / "bin").iterdir()]:
            if entry.name not in ("bin", "nvcc"):
                (home / entry.relative_to(real)).symlink_to(entry)
        flag, calls = base / "no-compiler", base / "calls"
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(NVCC.format(flag=flag, calls=calls, real=real / "bin" / "nvcc"))
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
        env = {**os.environ, "CUDA_HOME": str(home), "CCACHE_DIR": str(base / "ccache")}
        env["PYTHONPATH"] = str(ROOT)
        yield SimpleNamespace(
            base=base, output=base / "out", home=home, env=env,
            python=environments.build_interpreter("spark", "kernels"), flag=flag, calls=calls,
        )  # fmt: skip


def command(site, *more):
    invoke = (sys.executable, "-m", "invoke", "build.kernels", "--set", "trial")
    return [*invoke, "--output", str(site.output), "--python", str(site.python), *more]


def inv(site, *more):
    return subprocess.run(command(site, *more), cwd=ROOT, env=site.env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def killed(site):
    """A build that is killed with SIGKILL as soon as its first object exists."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command(site), cwd=ROOT, env=site.env, start_new_session=True, **quiet)
    try:
        while first.poll() is None and not list(site.output.rglob("*.o")):
            time.sleep(0.02)
    finally:
        first.kill()
    assert first.wait() == -signal.SIGKILL, "it ended before it could be killed"
    assert not list(site.output.glob("*.manifest.json"))
    return site


@pytest.fixture(scope="module")
def built(killed):
    result = inv(killed)
    assert result.returncode == 0, result.stderr
    killed.stderr = result.stderr
    return killed


@pytest.mark.nightly
def test_after_a_kill_the_next_run_finishes_the_job(built):
    document = json.loads((built.output / "kernels-trial.env.manifest.json").read_text())
    (library,) = document["outputs"]
    assert library == f".cache/flashinfer/{TABLE.flashinfer}/121a/cached_ops/{SMALL.name}/{SMALL.name}.so"
    assert document["facts"]["units"] == 3
    assert document["facts"]["compiled"] + document["facts"]["cached"] == 3
    assert 0 < max(unit["peak"] for unit in document["facts"]["each"].values()) < document["facts"]["budget"]


@pytest.mark.nightly
@pytest.mark.needs("aarch64-linux-gnu-g++")
def test_a_sparks_module_is_compiled_here_with_the_same_machine_code(built):
    env = {key: value for key, value in built.env.items() if key != "CUDA_HOME"}
    spark = SimpleNamespace(output=built.base / "aarch64", python=built.python, env=env)
    result = inv(spark, "--platform", "linux/arm64")
    assert result.returncode == 0, result.stderr
    reports = [json.loads((folder / "audit-trial.json").read_text()) for folder in (built.output, spark.output)]
    native, foreign = (
        [(cubin["sha256"], cubin["target"]) for cubin in report["files"][0]["cubins"]] for report in reports
    )
    assert native == foreign
    assert [target for _, target in foreign] == ["sm_121a"] * 3
    assert reports[1]["files"][0]["host"]["machine"] == "aarch64"


def serve(site, **changed):
    """Load the module by FlashInfer, without a compiler and with an empty ccache."""
    lines = (site.output / "kernels-trial.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines) | changed
    libraries = site.base / "libraries"
    libraries.mkdir(exist_ok=True)
    if not (libraries / "libcuda.so.1").exists():
        (libraries / "libcuda.so.1").symlink_to(site.home / "lib/stubs/libcuda.so")
    env = {
        **os.environ, **variables, "CCACHE_DIR": str(site.base / "empty"),
        "LD_LIBRARY_PATH": f"{libraries}:{site.home / 'lib'}", "PATH": f"{site.python.parent}:/usr/bin:/bin",
    }  # fmt: skip
    env.pop("PYTHONPATH", None)
    question = json.dumps(sets.request(SMALL))
    arguments = [site.python, "-c", SERVER, ROOT / "sparkforge" / "compile" / "flashinfer" / "specs.py"]
    return subprocess.run(arguments, env=env, input=question, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_a_server_loads_it_without_a_compiler(built):
    built.flag.touch()
    try:
        server = serve(built)
        assert server.returncode == 0, server.stderr
        assert "Function" in server.stdout
        assert not built.calls.exists()
        other = serve(built, FLASHINFER_NVCC_LAUNCHER="")  # the test can fail: this build.ninja needs a compiler
        assert other.returncode != 0
        assert "mha.cu" in built.calls.read_text()
    finally:
        built.flag.unlink()
