"""
Copyright (c) 2026 by FlashInfer team.

Licensed under the Apache License, Version 2.0 (the "License");
you may not use this file except in compliance with the License.
You may obtain a copy of the License at

  http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software
distributed under the License is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
See the License for the specific language governing permissions and
limitations under the License.
"""

import os

import pytest

from flashinfer.jit import cpp_ext

GIB = 1024**3
PROC = "22 1 0:20 / /proc rw - proc proc rw\n"
CGROUP2 = PROC + "29 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
CGROUP1 = PROC + "31 29 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture
def parallelism(monkeypatch):
    """The module under test, on a machine with 20 CPUs."""
    from flashinfer.jit import parallelism

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(20)), raising=False)
    return parallelism


@pytest.fixture
def machine(tmp_path):
    """Write a made-up /proc and cgroup tree below tmp_path."""

    def machine(available, **files):
        files["proc/meminfo"] = f"MemAvailable: {available // 1024} kB\n"
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")
        return tmp_path

    return machine


@pytest.mark.parametrize(
    "available, jobs",
    [
        (500 * GIB, 20),  # as many as CPUs
        (119 * GIB, 11),  # DGX Spark, nothing else running
        (24 * GIB, 2),
        (22 * GIB, 1),
        (0, 1),  # never less than one
    ],
)
def test_jobs_are_bound_by_available_memory(parallelism, machine, available, jobs):
    assert parallelism.get_default_jobs(machine(available)) == jobs


def test_the_cgroup2_limit_counts_without_droppable_cache(parallelism, machine):
    root = machine(
        119 * GIB,
        **{
            "proc/self/cgroup": "0::/build",
            "proc/self/mountinfo": CGROUP2,
            "sys/fs/cgroup/build/memory.max": 32 * GIB,
            "sys/fs/cgroup/build/memory.current": 10 * GIB,
            "sys/fs/cgroup/build/memory.stat": f"anon 1\ninactive_file {4 * GIB}",
        },
    )
    assert parallelism.available_memory(root) == 26 * GIB
    assert parallelism.get_default_jobs(root) == 2


def test_the_cgroup1_limit_counts(parallelism, machine):
    root = machine(
        119 * GIB,
        **{
            "proc/self/cgroup": "4:memory:/build",
            "proc/self/mountinfo": CGROUP1,
            "sys/fs/cgroup/memory/build/memory.limit_in_bytes": 16 * GIB,
            "sys/fs/cgroup/memory/build/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory/build/memory.stat": "total_inactive_file 0",
        },
    )
    assert parallelism.get_default_jobs(root) == 1


def test_cpu_quota(parallelism, machine):
    root = machine(
        500 * GIB,
        **{
            "proc/self/cgroup": "0::/build",
            "proc/self/mountinfo": CGROUP2,
            "sys/fs/cgroup/build/cpu.max": "250000 100000",
        },
    )
    assert parallelism.get_default_jobs(root) == 3


def test_unknown_memory_leaves_ninja_its_default(parallelism, tmp_path):
    assert parallelism.get_default_jobs(tmp_path) is None


@pytest.mark.parametrize("max_jobs", ["1", "4", "64"])
def test_max_jobs_is_passed_on(monkeypatch, max_jobs):
    monkeypatch.setenv("MAX_JOBS", max_jobs)
    assert cpp_ext._get_num_workers() == int(max_jobs)


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="needs Linux")
def test_without_max_jobs_a_build_is_bound(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    workers = cpp_ext._get_num_workers()
    assert workers is not None and 1 <= workers <= (os.cpu_count() or 1)
