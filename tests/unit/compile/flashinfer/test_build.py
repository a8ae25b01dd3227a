"""The build of kernels with a real interpreter, ninja and C++ compiler; a small FlashInfer stands for the real one."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from expected import refused

from sparkforge.compile.flashinfer import build, sets
from sparkforge.core import manifest
from sparkforge.core.files import sha256_file

pytestmark = pytest.mark.needs("c++", "ninja")


def with_arguments(site, **arguments):
    return replace(site.order, modules=(site.module.model_copy(update={"arguments": arguments}),))


def counts(built):
    result, _ = built
    return result.compiled, result.cached, result.units


def test_it_builds_and_then_only_what_was_changed(site):
    first = build.build(site.order)
    assert counts(first) == (2, 0, 2)
    assert first[1]
    assert manifest.load(site.order.variables_file).facts["modules"] == {"tiny": 2}
    built_at = site.library.stat().st_mtime_ns
    env = dict(line.split("=", 1) for line in site.order.variables_file.read_text().splitlines())
    assert env["FLASHINFER_WORKSPACE_BASE"] == str(site.order.output)
    assert env["FLASHINFER_MOE_SM120_DTYPES"] == "fp8xfp4"
    assert env["VLLM_HAS_FLASHINFER_CUBIN"] == "1"
    assert counts(build.build(site.order)) == (0, 0, 2)
    assert site.library.stat().st_mtime_ns == built_at
    before = sha256_file(site.library)
    site.library.write_bytes(b"other")
    assert counts(build.build(site.order)) == (0, 0, 2)
    assert sha256_file(site.library) == before
    time.sleep(0.01)
    (site.jit / "one.h").write_text("inline int one() { return 11; }\n")
    assert counts(build.build(site.order)) == (1, 0, 2)
    assert sha256_file(site.library) != before


def test_after_a_failure_there_is_no_manifest_and_the_next_build_finishes(site):
    build.build(site.order)
    (site.jit / "two.cpp").write_text("int second() { return nothing; }\n")
    with refused("process.failed", "nothing"):
        build.build(site.order)
    assert not list(site.order.output.glob("*.manifest.json"))
    (site.jit / "two.cpp").write_text("int second() { return 2; }\n")
    build.build(site.order)
    assert list(site.order.output.glob("*.manifest.json"))


def test_modules_that_a_server_would_rebuild_are_refused(site):
    with refused("compile.kernels", "tiny"):
        build.build(with_arguments(site, link="true"))
    assert not list(site.order.output.glob("*.manifest.json"))
    with refused("compile.environment", "made other instead of tiny"):
        build.build(with_arguments(site, name="other"))


@pytest.mark.slow
def test_it_waits_for_compilers_of_a_killed_build_and_leaves_them_what_they_need(site, capfd):
    """A dry run of ninja would remove the depfiles that compilers have written, and ccache would store nothing."""
    build.build(site.order)
    site.order.variables_file.with_name(f"{site.order.variables_file.name}.manifest.json").unlink()
    unit = site.library.with_name("csrc_one.o")
    unit.unlink()
    depfile = site.library.with_name("csrc_one.o.d")
    depfile.write_text(f"{unit}: {site.jit}/one.cpp\n")
    lock = site.order.output / ".sparkforge-units.lock"
    holds = "import fcntl, os, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_SH)"
    code = f"{holds}; print(flush=True); time.sleep(1); sys.exit(not os.path.exists(sys.argv[2]))"
    with subprocess.Popen([sys.executable, "-c", code, lock, depfile], stdout=subprocess.PIPE) as compiler:
        compiler.stdout.readline()
        build.build(site.order)
        assert compiler.wait() == 0, "its depfile was gone"
    assert "waiting for them" in capfd.readouterr().err


def test_an_environment_is_examined(site, monkeypatch):
    table = sets.load("0.7.0.post1")
    (site.jit.parent.parent / "flashinfer_python-0.7.0.post1.dist-info/RECORD").write_text(
        f"a.py,sha256={'A' * 43},0\n"
    )
    monkeypatch.setattr(build, "REMOVED", ())
    with refused("compile.environment", r"flashinfer-python 0\.7\.0\.post1 is upstream's wheel") as error:
        build.examine(site.python, table, "spark")
    assert "./inv patch   # prints the path" in error.value.fix
    (site.jit.parent.parent / "torch-2.13.0.dist-info/METADATA").unlink()
    (site.jit.parent.parent / "torch-2.13.0.dist-info").rmdir()
    with refused("compile.environment", "torch is not installed"):
        build.examine(site.python, table, "spark")
    with refused("compile.environment", "cannot query"):
        build.examine(Path("/bin/true"), table, "spark")
