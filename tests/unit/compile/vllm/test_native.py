"""`./inv build` on the small vLLM: the work of each stage, a second run, and refusals of the last audit.

Stages and audit are real. FlashInfer's kernels, which take an hour to compile, are replaced by one small library.
"""

import io

import pytest
from expected import refused
from invoke.program import Program
from programs import compile_library

import tasks
from lab.patches.lock import write_patched
from sparkforge import pins
from sparkforge.compile import stages as build
from sparkforge.compile.stages import BuildRequest
from sparkforge.core import manifest
from sparkforge.core.errors import AuditError, UsageError
from sparkforge.core.files import sha256_file, write_json
from sparkforge.patching import series, wheels
from sparkforge.pins import Component, StackImage

pytestmark = pytest.mark.needs("c++")
WHEEL = "vllm-0.32.0-cp38-abi3-manylinux_2_28_aarch64.whl"


@pytest.fixture
def ready(kit, patched_wheel, small, order, patched_lock, tmp_path, monkeypatch):
    """Pin a wheel with one library and the file that the queue patches; replace the compiled kernels."""
    from .conftest import UNIT

    code = compile_library(tmp_path / "made/spinloop.abi3.so", 'extern "C" int PyInit_spinloop() { return 1; }')
    unit = UNIT.format(name="spinloop").encode()
    members = {"vllm/spinloop.abi3.so": code.read_bytes(), "csrc/spinloop.cpp": unit}
    built = patched_wheel.build(tmp_path, members, "vllm", "0.32.0").rename(tmp_path / WHEEL)
    wheel = {"version": "0.32.0", "kind": "wheel", "package": "vllm", "licence": "Apache-2.0", "why": "test",
             "patches": "vllm-0.32.0",
             "files": {WHEEL: {"sha256": kit.seed(WHEEL, built.read_bytes()), "size": "unknown"}}}  # fmt: skip
    stacks = pins.load().stacks
    stacks["spark"].components["vllm-wheel"] = component = Component(**wheel)
    stacks["spark"].git.clear()  # the small vLLM fetches nothing
    stacks["tiny"] = stacks["spark"].model_copy(update={"image": StackImage(device="cpu", locks={"x86_64": "l"})})
    queue = series.Queue.load(small / "patches/vllm-0.32.0")
    entry = wheels.make(tmp_path / WHEEL, component, queue, 1, io.BytesIO())
    write_patched({WHEEL: entry}, patched_lock)

    def build_kernels(request):
        assert request.stack == "spark"
        artifact = kernels()
        is_new = manifest.load(artifact) is None
        if is_new:
            file = compile_library(artifact.parent / "cached_ops/sampling/sampling.so", "int f() { return 1; }")
            outputs = {"cached_ops/sampling/sampling.so": sha256_file(file)}
            record = manifest.Manifest("kernels", {}, outputs, {}, {}, 1.0)
            write_json(manifest.beside(artifact), vars(record))
        return artifact, is_new

    monkeypatch.setattr(build, "build_kernels", build_kernels)
    return tmp_path


def kernels():
    return build.paths.state() / "kernels/kernels-gpt-oss.env"


def test_every_stage_runs_once_and_a_second_run_does_nothing(ready):
    stages = ["sources", "patches", "kernels", "vllm", "audit"]
    assert build.build(BuildRequest("spark")) == dict.fromkeys(stages, True)
    assert build.build(BuildRequest("spark")) == dict.fromkeys(stages, False)
    tree, _ = build.unpack_wheel("spark")
    assert "ANSWER + 1" in (tree / "csrc/spinloop.cpp").read_text(), "the wheel's files are patched"


def test_the_last_audit_sees_what_was_changed_behind_the_stages_back(ready):
    build.build(BuildRequest("spark"))
    (kernels().parent / "cached_ops/sampling/sampling.so").write_bytes(b"\x7fELF and no more")
    with pytest.raises(AuditError, match="damaged"):
        build.build(BuildRequest("spark"))


def test_the_command_line_is_refused_with_a_next_step(capfd):
    for arguments, message in (
        ("--engine podman", "--engine 'podman' is not known"), ("--from git", "'git' is not known"),
        ("--only audit", "the parts sources and toolchain"), ("--jobs many --from source", "--jobs is 'many'"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            Program(namespace=tasks.namespace).run(f"inv build {arguments}", exit=True)
        assert ended.value.code == UsageError.exit_code
        assert message in capfd.readouterr().err


@pytest.mark.usefixtures("ready")
def test_a_stack_that_has_nothing_to_compile_names_the_command_for_its_image():
    with refused("usage", r"built in a container image only.* · \./inv build --engine docker --stack tiny$"):
        build.build(BuildRequest("tiny"))
