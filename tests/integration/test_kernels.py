"""The smallest set of kernels through `./inv build.kernels`: killed, resumed, unchanged, loaded without a compiler.

And what kernels.toml says, against the sources that it cites: vLLM's sdist and FlashInfer's own package.
"""

import ast
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace

import pytest

from sparkforge import environments, pins
from sparkforge.compile import toolchain
from sparkforge.compile.flashinfer import sets
from sparkforge.core.paths import ROOT
from sparkforge.sources import fetch

pytestmark = [pytest.mark.integration, pytest.mark.needs("c++")]
TABLE = sets.load("0.7.0.post1")
(SMALL,) = TABLE.chosen("trial")
# Loads a module as a server does: FlashInfer's own JitSpec, from the specification that its own generator makes.
SERVER = """
import json, os, runpy, sys
specs = runpy.run_path(sys.argv[1])
specs["enter"](specs["Path"](specs["probe"]()["package"]))
request = json.load(sys.stdin)
resolve = specs["resolve"]
arguments = {key: resolve(value) for key, value in request["arguments"].items()}
print(resolve("@" + request["generator"])(**arguments).build_and_load().xqa_wrapper)
"""
# Stands before the real nvcc, so that it can be taken away: it then says its version, notes the call, and fails.
NVCC = '#!/bin/sh\nif [ -e {flag} ] && [ "$1" != --version ]; then echo "$@" >> {calls}; exit 1; fi\nexec {real} "$@"\n'


@pytest.fixture(scope="module")
def site(large_folder):
    """An output folder, the environment's interpreter, and a CUDA_HOME whose nvcc can be taken away."""
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
            base=base,
            output=base / "out",
            home=home,
            env=env,
            python=environments.build_interpreter("spark", "kernels"),
            flag=flag,
            calls=calls,
        )


def command(site, *more):
    invoke = (sys.executable, "-m", "invoke", "build.kernels", "--set", "trial")
    return [*invoke, "--output", str(site.output), "--python", str(site.python), *more]


def inv(site, *more):
    return subprocess.run(command(site, *more), cwd=ROOT, env=site.env, capture_output=True, text=True, check=False)


def manifest(site):
    return json.loads((site.output / "kernels-trial.env.manifest.json").read_text())


@pytest.fixture(scope="module")
def killed(site):
    """A build that is killed, with the kernel's own signal, as soon as its first object is there."""
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
    document = manifest(built)
    (library,) = document["outputs"]
    assert library == f".cache/flashinfer/{TABLE.flashinfer}/121a/cached_ops/{SMALL.name}/{SMALL.name}.so"
    assert document["facts"]["units"] == 3
    assert document["facts"]["compiled"] + document["facts"]["cached"] == 3
    assert 0 < max(unit["peak"] for unit in document["facts"]["each"].values()) < document["facts"]["budget"]


@pytest.mark.nightly
def test_the_audit_saw_tensor_cores_and_the_right_target(built):
    report = json.loads((built.output / "audit-trial.json").read_text())
    assert report["violations"] == []
    assert {row["target"] for row in report["coverage"]} == {"sm_121a"}
    kernels = [kernel for file in report["files"] for cubin in file["cubins"] for kernel in cubin["kernels"]]
    (decode,) = (kernel for kernel in kernels if "kernel_mha" in kernel["name"])
    assert decode["mnemonics"]["HMMA.16816.F32.BF16"] >= 64


@pytest.mark.nightly
def test_nothing_of_the_run_is_in_the_library(built):
    """nvcc would write its process id into a symbol's name, and two builds would never be the same bytes."""
    library = (built.output / next(iter(manifest(built)["outputs"]))).read_bytes()
    assert b"_GLOBAL__sub_I_xqa_mha.cuda.o.cudafe1.cpp" in library
    assert b"tmpxft_" not in library
    assert str(built.base).encode() not in library


@pytest.mark.nightly
def test_without_a_change_nothing_is_compiled(built):
    library = built.output / next(iter(manifest(built)["outputs"]))
    before = library.stat().st_mtime_ns
    result = inv(built)
    assert result.returncode == 0, result.stderr
    assert "0 of 3 units compiled, 0 from ccache" in result.stderr
    assert "unchanged" in result.stderr
    assert library.stat().st_mtime_ns == before


def serve(site, **changed):
    """Load the module by FlashInfer itself, where nothing can compile and ccache is empty."""
    lines = (site.output / "kernels-trial.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines) | changed
    libraries = site.base / "libraries"
    libraries.mkdir(exist_ok=True)
    if not (libraries / "libcuda.so.1").exists():
        (libraries / "libcuda.so.1").symlink_to(site.home / "lib/stubs/libcuda.so")
    env = {
        **os.environ,
        **variables,
        "CCACHE_DIR": str(site.base / "empty"),
        "LD_LIBRARY_PATH": f"{libraries}:{site.home / 'lib'}",
        "PATH": f"{site.python.parent}:/usr/bin:/bin",
    }
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
        other = serve(built, FLASHINFER_NVCC_LAUNCHER="")  # the test can fail: another build.ninja must be compiled
        assert other.returncode != 0
        assert "mha.cu" in built.calls.read_text()
    finally:
        built.flag.unlink()


@pytest.mark.nightly
def test_the_other_door_needs_neither_ninja_nor_headers(built):
    """A library under flashinfer/data/aot is loaded as it is: no cache, no CUDA_HOME, nothing may be compiled."""
    package = next(built.python.parent.parent.glob("lib/python*/site-packages/flashinfer"))
    path = package / "data" / "aot" / SMALL.name
    nowhere = {
        "CUDA_HOME": "/nowhere",
        "FLASHINFER_DISABLE_JIT": "1",
        "FLASHINFER_WORKSPACE_BASE": str(built.base / "w"),
    }
    refused = serve(built, **nowhere)
    assert "JIT compilation is disabled" in refused.stderr
    path.mkdir(parents=True)
    try:
        shutil.copy2(built.output / next(iter(manifest(built)["outputs"])), path)
        server = serve(built, **nowhere)
        assert server.returncode == 0, server.stderr
    finally:
        shutil.rmtree(path)


@pytest.mark.nightly
def test_a_library_that_was_swapped_is_linked_again(built):
    before = manifest(built)["outputs"]
    library = built.output / next(iter(before))
    library.write_bytes(library.read_bytes() + b"x")
    result = inv(built)
    assert result.returncode == 0, result.stderr
    assert manifest(built)["outputs"] == before


@pytest.mark.nightly
def test_an_interpreter_without_flashinfer_is_refused(site):
    result = inv(SimpleNamespace(**{**vars(site), "python": sys.executable}))
    assert result.returncode == 50
    assert "flashinfer-python is not installed" in result.stderr


def test_every_call_stands_in_vllms_sdist():
    component = pins.load().component("spark", "vllm")
    (name,) = [name for name in component.files if name.endswith(".tar.gz")]
    sdist = fetch.fetch_pinned(component, name)
    with tarfile.open(sdist) as archive:
        for call in TABLE.calls.values():
            lines = archive.extractfile(f"vllm-0.32.0/{call.file}").read().decode().splitlines()
            assert call.text in lines[call.line - 1], call


@pytest.mark.nightly
def test_the_sink_modules_are_those_that_the_wrapper_asks_for(site):
    """Evaluate the wrapper's own jit_args and jit_kwargs, with names of objects in place of objects."""
    package = next(site.python.parent.parent.glob("lib/python*/site-packages/flashinfer"))
    wrapper = ast.parse((package / "attention/_core.py").read_text())
    parts = {
        node.targets[0].id: compile(ast.Expression(node.value), "wrapper", "eval")
        for node in ast.walk(wrapper)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("jit_args", "jit_kwargs")
    }
    generators = ast.parse((package / "jit/attention/modules.py").read_text())
    (generator,) = (
        node
        for node in ast.walk(generators)
        if isinstance(node, ast.FunctionDef) and node.name == "gen_customize_batch_prefill_module"
    )
    names = [parameter.arg for parameter in generator.args.args]
    for module in TABLE.module:
        if module.call == "prefill":
            asked = evaluated(parts, module.arguments["dtype_kv"], window=127 if "swa_True" in module.name else -1)
            positional = dict(zip(names, ["fa2", *asked["jit_args"]], strict=False))
            assert positional | asked["jit_kwargs"] == module.arguments
            assert positional["uri"] == module.name


def evaluated(parts, kv_data_type, window):
    scope = {
        "backend": "fa2", "q_data_type": "@torch:bfloat16", "kv_data_type": kv_data_type, "window_left": window,
        "head_dim_qk": 64, "head_dim_vo": 64, "pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False,
        "filename_safe_dtype_map": {"@torch:bfloat16": "bf16", "@torch:float8_e4m3fn": "e4m3"},
        "PosEncodingMode": {"NONE": SimpleNamespace(value=0)}, "torch": SimpleNamespace(int32="@torch:int32"),
        "attention_sink_decl": {"fa2": "@flashinfer.jit.attention.variants:attention_sink_fa2_decl"},
    }  # fmt: skip
    return {name: eval(code, {}, dict(scope)) for name, code in parts.items()}  # noqa: S307 - of the pinned wheel
