"""vLLM's wheel where upstream has none: what the build is told, and what becomes of the wheel that it leaves."""

import hashlib
import json
import zipfile
from base64 import urlsafe_b64encode

import pytest

from sparkforge import pins
from sparkforge.compile.vllm import wheel as vllm_wheel
from sparkforge.core.errors import CompileError, ProcessError
from sparkforge.patching import wheels
from sparkforge.pins import patched

from .conftest import UNIT

NAME = "vllm-0.32.0-cp312-cp312-linux_x86_64.whl"


def write_wheel(path):
    members = {
        "csrc/spinloop.cpp": UNIT.format(name="spinloop").encode(),
        "vllm-0.32.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n\n",
    }
    hashes = {name: urlsafe_b64encode(hashlib.sha256(data).digest()).decode() for name, data in members.items()}
    lines = [f"{name},sha256={hashes[name].rstrip('=')},{len(data)}\n" for name, data in members.items()]
    members["vllm-0.32.0.dist-info/RECORD"] = "".join([*lines, "vllm-0.32.0.dist-info/RECORD,,\n"]).encode()
    with zipfile.ZipFile(path, "w") as packed:
        for name, data in members.items():
            packed.writestr(name, data)


@pytest.fixture
def folder(small, tmp_path, monkeypatch):
    """The small vLLM with its needed repositories by hand, a lock of its own, and a pip that leaves a wheel."""
    for name, pin in pins.load().stack("spark").git.items():
        if pin.of == "vllm" and pin.needed:
            (tmp_path / name).mkdir()
            monkeypatch.setenv(pin.src_dir, str(tmp_path / name))
    write_wheel(tmp_path / NAME)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nenv > {tmp_path}/variables\necho "$@" > {tmp_path}/words\n'
        f'while [ "$1" != --wheel-dir ]; do shift; done\n[ ! -f {tmp_path}/{NAME} ] || cp {tmp_path}/{NAME} "$2"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(patched, "PATH", tmp_path / "patched.toml")
    monkeypatch.setattr(vllm_wheel, "ROOT", small)
    return tmp_path


def variables(folder):
    return dict(line.split("=", 1) for line in (folder / "variables").read_text().splitlines() if "=" in line)


def test_the_wheel_is_patched_and_its_hashes_are_in_the_lock(folder):
    wheel = vllm_wheel.build_wheel("spark", folder / "python", folder / "out")
    assert wheel.name == NAME.replace("0.32.0", "0.32.0+sparkforge.1")
    entry = patched.load_patched()[NAME]
    assert entry.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert entry.record
    with zipfile.ZipFile(wheel) as opened:
        assert b"ANSWER + 1" in opened.read("csrc/spinloop.cpp")
        origin = json.loads(opened.read("vllm-0.32.0+sparkforge.1.dist-info/patches/upstream.json"))
    assert (origin["filename"], origin["version"]) == (NAME, "0.32.0")
    assert [path.name for path in (folder / "out").iterdir()] == [wheel.name]


def test_other_entries_of_the_lock_stay(folder):
    first = vllm_wheel.build_wheel("spark", folder / "python", folder / "out")
    other = patched.load_patched()[NAME].model_copy(update={"file": "other.whl"})
    patched.write_patched({"other": other})
    vllm_wheel.build_wheel("spark", folder / "python", folder / "out")
    assert patched.load_patched().keys() == {"other", NAME}
    assert first.is_file()


def test_the_build_is_told_architecture_jobs_and_every_repository(folder):
    vllm_wheel.build_wheel("spark", folder / "python", folder / "out", jobs="1")
    environment, arguments = variables(folder), (folder / "words").read_text()
    assert (environment["TORCH_CUDA_ARCH_LIST"], environment["MAX_JOBS"]) == ("12.1a", "1")
    assert environment["VLLM_VERSION_OVERRIDE"] == "0.32.0"
    assert environment["VLLM_CUTLASS_SRC_DIR"] == str(folder / "cutlass")
    left_out = {pin.src_dir for pin in pins.load().stack("spark").git.values() if not pin.needed and not pin.switch}
    assert left_out
    assert left_out <= environment.keys()
    assert {"wheel", "--no-build-isolation", "--no-index", "--no-deps"} <= set(arguments.split())


def test_a_folder_of_a_repository_is_named_where_upstream_wants_one(folder, monkeypatch):
    table = pins.load()
    stack = table.stacks["spark"]
    pin = stack.git["triton-kernels"].model_copy(update={"folder": "python/triton_kernels"})
    changed = table.model_copy(
        update={"stacks": {"spark": stack.model_copy(update={"git": {**stack.git, "triton-kernels": pin}})}}
    )
    monkeypatch.setattr(pins, "load", lambda: changed)
    vllm_wheel.build_wheel("spark", folder / "python", folder / "out")
    assert variables(folder)["TRITON_KERNELS_SRC_DIR"] == str(folder / "triton-kernels/python/triton_kernels")


def test_missing_repositories_are_named_all_at_once_with_the_commands_that_bring_them(folder, monkeypatch):
    for name in ("VLLM_CUTLASS_SRC_DIR", "VLLM_FLASH_ATTN_SRC_DIR"):
        monkeypatch.delenv(name)
    (folder / "empty").mkdir()
    with pytest.raises(CompileError, match="2 of vLLM's repositories are missing") as refused:
        vllm_wheel.build_wheel("spark", folder / "python", folder / "out", sources=str(folder / "empty"))
    assert refused.value.code == "compile.inputs"
    assert "cutlass" in refused.value.why
    assert "flash-attention" in refused.value.why
    assert not (folder / "variables").exists(), "nothing was compiled"


def test_a_build_that_fails_or_leaves_no_wheel_changes_no_lock(folder):
    (folder / NAME).unlink()
    with pytest.raises(CompileError, match="left no wheel") as refused:
        vllm_wheel.build_wheel("spark", folder / "python", folder / "out")
    assert refused.value.code == "compile.incomplete"
    (folder / "python").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ProcessError):
        vllm_wheel.build_wheel("spark", folder / "python", folder / "out")
    assert not (folder / "patched.toml").exists()


def test_a_wheel_that_the_queue_does_not_fit_changes_no_lock(folder, monkeypatch):
    def refuse(*_arguments):
        raise CompileError("no", "x", "y", code="compile.inputs")

    monkeypatch.setattr(wheels, "make", refuse)
    with pytest.raises(CompileError):
        vllm_wheel.build_wheel("spark", folder / "python", folder / "out")
    assert not (folder / "patched.toml").exists()
