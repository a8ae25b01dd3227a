"""Real builds of the small vLLM: compiled units, a second run, and the files of killed and failed runs."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from expected import refused

from sparkforge.compile.vllm import build as vllm_build
from sparkforge.compile.vllm import sources as vllm_sources
from sparkforge.compile.vllm.build import ExtensionRequest
from sparkforge.core import manifest
from sparkforge.core.errors import AuditError, UsageError
from sparkforge.core.paths import ROOT
from sparkforge.core.process import started_at

pytestmark = [pytest.mark.slow, pytest.mark.needs("cmake", "ninja", "c++", "patch")]
TABLE = vllm_sources.load_targets("0.32.0")


def answer(overlay, name):
    return ctypes.CDLL(str(overlay / f"vllm/{name}.abi3.so"))[f"PyInit_{name}"]()


def test_the_overlay_holds_what_was_ordered_compiled_once_from_patched_sources(order):
    assert vllm_build.build(order("spinloop")).compiled == 1
    order.forget()
    again = vllm_build.build(order("spinloop"))
    assert (again.compiled, again.cached, again.units) == (0, 0, 1)
    assert order.compiled() == []
    stamp = (order("spinloop").folder / "configured.json").stat().st_mtime_ns
    extension_order = order("spinloop", "fs_io_C")
    build = vllm_build.build(extension_order)
    assert (build.compiled, build.units) == (1, 2)
    assert (order("spinloop").folder / "configured.json").stat().st_mtime_ns == stamp
    assert (answer(extension_order.output, "spinloop"), answer(extension_order.output, "fs_io_C")) == (43, 42)
    record = manifest.load(extension_order.output)
    assert set(record.outputs) == {"vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so"}
    assert record.inputs["queue"] == extension_order.sources.queue.sha256
    assert record.inputs["arch"] == "12.1a"
    assert record.facts["machine"] == os.uname().machine


@pytest.fixture
def edit_patch(small):
    file = small / "patches/vllm-0.32.0/0001-change-something.patch"
    return lambda before, after: file.write_text(file.read_text().replace(before, after))


def test_another_queue_makes_another_build_and_one_that_does_not_compile_leaves_the_old_overlay(order, edit_patch):
    first = order("spinloop")
    vllm_build.build(first)
    before = (first.output / "vllm/spinloop.abi3.so").read_bytes()
    edit_patch("ANSWER + 1", "NO_SUCH_NAME")
    with refused("process.failed", r"(?s)spinloop/csrc/spinloop.cpp.o ended with code 1.*NO_SUCH_NAME"):
        vllm_build.build(order("spinloop"))
    assert (first.output / "vllm/spinloop.abi3.so").read_bytes() == before
    edit_patch("NO_SUCH_NAME", "ANSWER + 2")
    second = order("spinloop")
    vllm_build.build(second)
    assert answer(second.output, "spinloop") == 44
    assert not first.folder.exists()


def test_a_source_that_was_edited_by_hand_is_refused_with_its_name(order):
    extension_order = order("spinloop")
    (extension_order.sources.tree / "csrc/fs_io_C.cpp").write_text("int edited;\n")
    with refused("patch.modified", r"csrc/fs_io_C.cpp was edited by hand"):
        vllm_build.build(extension_order)


def test_a_failed_audit_refuses_the_build(order, edit_patch):
    edit_patch("PyInit_spinloop() { return ANSWER + 1", "PyInit_another() { return 1")
    with pytest.raises(AuditError, match="it is not the Python module spinloop"):
        vllm_build.build(order("spinloop"))
    assert not order("spinloop").output.exists()


def test_another_architecture_chosen_by_cmake_is_an_error(order):
    with refused("compile.incomplete", r"do not select 12.0f for 12.0f · they select 12.0"):
        vllm_build.build(order("spinloop", arch="12.0f"))
    assert not (order("spinloop", arch="12.0f").folder / "configured.json").exists()


def test_what_a_killed_build_compiles_is_waited_for_and_the_next_run_finishes(order, tmp_path):
    """After SIGKILL to the building process its compiler keeps running and holds the lock; the next run waits for it.

    It waits before it runs ninja, which would remove the compiler's depfile.
    """
    extension_order = order("spinloop", "fs_io_C")
    vllm_build.configure(extension_order)
    arguments = shlex.split(vllm_build.units_of(extension_order)[0].command[-1])
    depfile = extension_order.folder / "cmake" / arguments[arguments.index("-MF") + 1]
    depfile.write_text(f"{str(depfile).removesuffix('.d')}: \n")
    ready, lock = tmp_path / "ready", extension_order.folder / "units.lock"
    script = f"""
from pathlib import Path
from sparkforge.compile import jobs
from sparkforge.core import memory
unit = jobs.Unit("u", ("sh", "-c", "touch {ready}; sleep 1; mv {depfile} {tmp_path}/late"))
site = jobs.Site({{}}, Path({str(tmp_path)!r}), Path({str(lock)!r}))
jobs.run([unit], jobs.make_schedule(["u"], memory.Machine(1 << 40, 2)), site)
"""
    builder = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not ready.exists():
        time.sleep(0.01)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    assert started_at(builder.pid) is None
    build = vllm_build.build(extension_order)
    assert (tmp_path / "late").exists(), "the build did not wait for the orphan, or removed its depfile"
    assert build.units == 2
    assert answer(extension_order.output, "fs_io_C") == 42


def test_a_unit_alone_is_compiled_audited_and_not_linked(order, capsys):
    extension_order = order("spinloop", "fs_io_C")
    (compiled,) = vllm_build.compile_units(extension_order, ["csrc/fs*.cpp"])
    assert compiled.is_file()
    assert compiled.name == "fs_io_C.cpp.o"
    assert "1 of 1 units compiled" in capsys.readouterr().err
    assert not extension_order.output.exists()
    assert not list(extension_order.folder.glob("cmake/*.so"))
    order.forget()
    with pytest.raises(UsageError, match=r"no unit matches csrc/none\.cu"):
        vllm_build.compile_units(extension_order, ["csrc/none.cu"])
    vllm_build.compile_units(extension_order, ["csrc/fs*.cpp"])
    assert order.compiled() == []
    assert vllm_build.build(extension_order).units == 2  # the full build continues from there


def test_unavailable_repositories_are_left_out_if_requested(small, tmp_path, capsys):
    fetch = vllm_sources.fetch_sources
    sources = fetch(TABLE, ["_C_stable_libtorch"], tmp_path, "spark", without_missing=True)
    assert sources.repositories["cutlass"].folder is None
    assert "without cutlass" in capsys.readouterr().err


# --- missing inputs ---


PINNED = "cb4247394dd82148787aed73e5dc7cef33cbf862"


def missing(folder, why, fix=""):
    with refused("compile.inputs", f"(?s)^1 of vLLM's repositories are missing · .*{why}.* · .*{fix}"):
        vllm_sources.fetch_sources(TABLE, ["_moe_C_stable_libtorch"], folder, "spark")


def test_a_missing_repository_is_named_with_its_reason_and_every_way_to_bring_it(small, tmp_path):
    why = rf"cutlass \(v4\.7\.1\): there is no git checkout {tmp_path / 'cutlass'}.*needed for _moe_C_stable_libtorch"
    missing(tmp_path, why, f"./inv bundle --more toolchain,build-vllm.*git -C DIR/cutlass fetch.*{PINNED}")


@pytest.mark.needs("git")
def test_a_checkout_at_another_commit_or_with_edits_is_not_taken(small, tmp_path, monkeypatch):
    path = tmp_path / "cutlass"
    path.mkdir()
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(["git", "-C", path, *arguments], check=True, capture_output=True)  # noqa: S607
    missing(tmp_path, f"and {PINNED} is pinned")
    head = subprocess.run(["git", "-C", path, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)  # noqa: S607
    stack = vllm_sources.pins.load().stacks["spark"]
    pin = stack.git["cutlass"].model_copy(update={"commit": head.stdout.strip()})
    assert vllm_sources._checkout("cutlass", pin, path).folder == path
    (path / "new.h").write_text("")
    with refused("compile.inputs", r"was edited: \?\? new.h"):
        vllm_sources._checkout("cutlass", pin, path)


def test_a_folder_that_a_variable_names_is_taken_by_its_content_and_said_aloud(small, tmp_path, monkeypatch, capfd):
    path = tmp_path / "mine"
    path.mkdir()
    (path / "a.h").write_text("1")
    monkeypatch.setenv("VLLM_CUTLASS_SRC_DIR", str(path))
    first = vllm_sources.fetch_sources(TABLE, ["_C_stable_libtorch"], None, "spark").repositories["cutlass"]
    (path / "a.h").write_text("2")
    second = vllm_sources.fetch_sources(TABLE, ["_C_stable_libtorch"], None, "spark").repositories["cutlass"]
    assert first.folder == path
    assert first.identity != second.identity
    assert "not compared with the pin" in capfd.readouterr().err
    monkeypatch.setenv("VLLM_CUTLASS_SRC_DIR", str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="there is no such folder"):
        vllm_sources.fetch_sources(TABLE, ["_C_stable_libtorch"], None, "spark")


def test_invalid_arguments_are_refused_before_any_download(tmp_path):
    (tmp_path / "precious").mkdir()
    for arguments, message in (
        ({"jobs": "0"}, "--jobs '0' is not a number"), ({"arch": "9.0a"}, "no rule for --arch 9.0a"),
        ({"targets": "_flashmla_C"}, "_flashmla_C is not built for SM121"),
        ({"targets": "spinloop", "output": str(tmp_path / "precious")}, "it exists and is not an overlay of ours"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            vllm_build.prepare(ExtensionRequest("spark", **arguments))
