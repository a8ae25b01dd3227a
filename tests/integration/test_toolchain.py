"""The locked compiler on a machine without CUDA: what it makes for 12.1a, ccache, and a cicc that is killed."""

import resource
import shutil
import subprocess
import threading
import time
from contextlib import suppress

import psutil
import pytest

from sparkforge.compile import jobs, toolchain
from sparkforge.compile.jobs import Site, Unit
from sparkforge.compile.peaks import Cost, Peaks
from sparkforge.core import memory

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.needs("c++")]  # test_audit compiles every day
KERNEL = """
#include <cuda_fp4.h>
#include <cuda.h>
__global__ void convert(const float2 *from, __nv_fp4x2_storage_t *to) {
  to[threadIdx.x] = __nv_cvt_float2_to_fp4x2(from[threadIdx.x], __NV_E2M1, cudaRoundNearest);
}
extern "C" int start(const float2 *from, __nv_fp4x2_storage_t *to) { convert<<<1, 32>>>(from, to); return cuInit(0); }
"""
SORT = """
#include <cub/cub.cuh>
__global__ void sort(float *a) {
  using Sort = cub::BlockRadixSort<float, 256, 31>;
  __shared__ typename Sort::TempStorage room; float v[31];
  for (int i = 0; i < 31; i++) v[i] = a[threadIdx.x * 31 + i];
  Sort(room).Sort(v);
  for (int i = 0; i < 31; i++) a[threadIdx.x * 31 + i] = v[i];
}
"""


@pytest.fixture(scope="module")
def chain(large_folder):
    """The locked toolchain, installed for these tests."""
    with pytest.MonkeyPatch.context() as patch, large_folder("state") as state, large_folder("ccache") as ccache:
        patch.setenv("SPARKFORGE_STATE", str(state))
        patch.delenv("CUDA_HOME", raising=False)
        path, installed = toolchain.install()
        assert installed
        assert toolchain.install() == (path, False)
        patch.setenv("CUDA_HOME", str(path / toolchain.HOME))
        patch.setenv("PATH", f"{path / 'bin'}:/usr/bin:/bin")
        patch.setenv("CCACHE_DIR", str(ccache))
        yield toolchain.find("12.1a")


FLAGS = ("-std=c++17", "-Xcompiler=-fPIC", "-gencode=arch=compute_121a,code=sm_121a")


def compile_command(chain, source, output):
    dependencies = ("--generate-dependencies-with-compile", "-MF", f"{output}.d")
    return (str(chain.ccache), str(chain.nvcc), *dependencies, *FLAGS, "-c", source, "-o", output)


def build(chain, sources, folder, watch=lambda *_: None, cores=2):
    for name, text in sources.items():
        (folder / name).write_text(text)
    units = [Unit(f"m/{name}", compile_command(chain, name, f"{name}.o"), folder) for name in sources]
    peaks = Peaks("nvcc of the test")
    peaks.learnt = {unit.name: Cost(10**9, 1.0) for unit in units}
    machine = memory.Machine(memory.measure().available, cores)
    schedule = jobs.make_schedule([unit.name for unit in units], peaks, machine)
    return jobs.run(units, schedule, peaks, Site(chain.environment(), folder / "logs", folder / "lock"), watch)


def test_it_compiles_hardware_fp4_for_121a_links_and_the_second_time_comes_from_ccache(chain, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "state"))
    report = build(chain, {"convert.cu": KERNEL}, tmp_path)
    assert not report.units["m/convert.cu"].cached
    learnt = Peaks("nvcc of the test").learnt["m/convert.cu"].peak  # no less than our own process, which forked it
    assert 100e6 < learnt < max(2e9, 1.01 * 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    cuobjdump, nvdisasm = toolchain.program("cuobjdump"), toolchain.program("nvdisasm")
    subprocess.run([cuobjdump, "-xelf", "all", "convert.cu.o"], cwd=tmp_path, check=True, capture_output=True)
    (cubin,) = tmp_path.glob("*.cubin")
    output = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    assert "E2M1" in output
    command = [chain.cxx, "-shared", "convert.cu.o", f"-L{chain.home}/lib64", f"-L{chain.home}/lib64/stubs"]
    subprocess.run([*command, "-lcudart", "-lcuda", "-lnvrtc", "-o", "m.so"], cwd=tmp_path, check=True)
    reader = [shutil.which("readelf"), "-d", tmp_path / "m.so"]
    needed = subprocess.run(reader, check=True, capture_output=True, text=True).stdout
    assert "[libcuda.so.1]" in needed
    assert "[libcudart.so.13]" in needed
    (tmp_path / "convert.cu.o").unlink()
    assert build(chain, {"convert.cu": KERNEL}, tmp_path).units["m/convert.cu"].cached
    assert (tmp_path / "convert.cu.o").exists()


def kill_first_cicc(killed):
    """Kill the first cicc that works on a file of this test, with the kernel's own signal."""
    while not killed.is_set():
        for process in psutil.process_iter(["name", "cmdline"]):
            if process.info["name"] == "cicc" and any("sort.cu" in word for word in process.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                    killed.set()
        time.sleep(0.005)


def test_a_cicc_that_is_killed_is_noticed_and_its_unit_built_alone(chain, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "state"))
    killed, events = threading.Event(), []
    thread = threading.Thread(target=kill_first_cicc, args=(killed,))
    thread.start()
    try:
        report = build(chain, {"sort.cu": SORT, "convert.cu": KERNEL}, tmp_path, lambda *e: events.append(e))
    finally:
        killed.set()
        thread.join()
    assert [(stage, unit.name) for stage, unit, _ in events if stage == "killed"] == [("killed", "m/sort.cu")]
    assert report.units["m/sort.cu"].retried
    assert (tmp_path / "sort.cu.o").exists()
