import os
import re
from functools import partial

import pytest
from programs import write_files

from sparkforge.core import memory
from sparkforge.core.memory import Machine

GB = 10**9


@pytest.fixture
def host(tmp_path):
    """A fake root with /proc and cgroup mounts as files; returns a function that writes {path: text} into it."""

    meminfo = "MemTotal: 99 kB\nMemAvailable: 20000000 kB\n"
    return partial(write_files, write_files(tmp_path, {"proc/meminfo": meminfo, "proc/self/mountinfo": ""}))


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def test_every_enclosing_group_of_version_2_bounds_and_droppable_cache_does_not_count(host):
    assert memory.measure(host({})).available == 20000000 * 1024  # MemAvailable without a group
    root = host(
        {
            "proc/self/mountinfo": V2, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": f"{GB}\n", "sys/fs/cgroup/a/memory.max": f"{8 * GB}\n",
            "sys/fs/cgroup/a/memory.high": f"{6 * GB}\n", "sys/fs/cgroup/a/memory.current": f"{3 * GB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GB}\n",
        }
    )  # fmt: skip
    assert memory.measure(root) == Machine(4 * GB, memory.cpus(root), str(root / "sys/fs/cgroup/a"))


@pytest.mark.parametrize("path", ["/outer/inner", "/docker/of-the-host"])
def test_version_1_bounds_and_a_container_sees_its_own_group_at_the_top(host, path):
    root = host(
        {
            "proc/self/mountinfo": V1.replace(" / /sys", " /docker/of-the-host /sys") if "docker" in path else V1,
            "proc/self/cgroup": f"4:memory:{path}\n3:cpuset:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{5 * GB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}\n",
        }
    )
    assert memory.measure(root).available == 4 * GB


@pytest.mark.parametrize(("quota", "bound"), [("150000 100000", 2), ("max 100000", 1 << 20), ("1 100000", 1)])
def test_a_cpu_quota_bounds_the_cores(host, quota, bound):
    root = host({"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"})
    assert memory.cpus(root) == min(bound, len(os.sched_getaffinity(0)))


def test_the_largest_process_is_named_unless_it_is_small():
    assert re.fullmatch(r".+ \(pid \d+\), [\d.]+ [GM]iB", memory.largest_process(1))
    assert f"(pid {os.getpid()})" not in memory.largest_process(1)
    assert memory.largest_process(1 << 60) == ""
