"""The memory guard's readings of the kernel's files, and when it decides that a server must end."""

import resource
from dataclasses import replace

import pytest

from sparkforge.core.paths import ROOT
from sparkforge.plan import thresholds
from sparkforge.plan.thresholds import GIB
from sparkforge.serve.supervise import MemoryWatch

SPARK = 120 * GIB
V2 = ("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/", "sys/fs/cgroup")
V1 = ("31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory", "4:memory:/", "sys/fs/cgroup/memory")


class Kernel:
    """A folder with the files of /proc and of a memory cgroup, which a test changes in place."""

    def __init__(self, root):
        self.root = root
        self.memory(SPARK, SPARK)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+" if path.exists() else "w") as file:  # write in place, because the guard keeps the file open
            file.write(text)
            file.truncate()

    def memory(self, available, total=SPARK):
        self.write(
            "proc/meminfo", f"MemTotal:  {total // 1024} kB\nMemFree: 1 kB\nMemAvailable:\t {available // 1024} kB\n"
        )

    def group(self, version, limit, used, cached=0, kills=0):
        mount, path, folder = version
        self.write("proc/self/mountinfo", mount + "\n")
        self.write("proc/self/cgroup", path + "\n")
        names = ("memory.max", "memory.current", "memory.events") if version is V2 else (
            "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")  # fmt: skip
        more = "" if version is V2 else "total_"
        self.write(f"{folder}/{names[0]}", f"{limit}\n")
        self.write(f"{folder}/{names[1]}", f"{used}\n")
        stat = f"anon 1\ninactive_file 7\nactive_file 8\n{more}inactive_file {cached}\n{more}active_file {cached}\n"
        self.write(
            f"{folder}/memory.stat", stat if version is V1 else stat.replace("inactive_file 7\nactive_file 8\n", "")
        )
        self.write(f"{folder}/{names[2]}", f"low 0\noom_kill_disable 0\noom_kill {kills}\n")


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


@pytest.fixture
def limits():
    return thresholds.load()


def after(watch, looks, begun=100.0):
    said = None
    for number in range(looks):
        said = watch.look(begun + number * watch.limits.period_seconds)
    return said


def test_with_enough_memory_the_guard_is_silent_and_allocates_no_page():
    watch = MemoryWatch(replace(thresholds.load(), end_gib=0, kill_gib=0), around=True)
    assert after(watch, 50) is None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    after(watch, 500)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100  # one page per reading would be 500


def test_low_memory_must_persist_and_very_low_memory_ends_immediately(kernel, limits):
    watch = MemoryWatch(limits, kernel.root, around=True)  # a kernel without cgroups
    kernel.memory(int(2.9 * GIB))
    assert after(watch, int(limits.looks) - 1) is None  # a dip
    kernel.memory(4 * GIB)
    assert after(watch, 1) is None
    kernel.memory(int(2.9 * GIB))
    trouble = after(watch, int(limits.looks))
    assert (trouble.now, trouble.why) == (False, "this machine has 2.9 GiB of 120.0 GiB left, under 3.0 GiB")
    kernel.memory(GIB)
    assert after(watch, 1).now


@pytest.mark.parametrize("version", [V2, V1])
def test_droppable_cache_does_not_count_for_a_containers_limit(kernel, limits, version):
    kernel.group(version, GIB, 950 << 20, cached=400 << 20)
    watch = MemoryWatch(limits, kernel.root, around=True)
    assert after(watch, 9) is None
    kernel.group(version, GIB, 950 << 20, cached=1 << 20)
    trouble = after(watch, int(limits.looks))
    assert trouble.why == "the container's or cgroup's limit has 76 MiB of 1.0 GiB left, under 102 MiB"
    kernel.group(version, "max" if version is V2 else 9223372036854771712, 950 << 20)
    assert after(watch, 9) is None
    for file in (kernel.root / version[2]).iterdir():  # the cgroup goes away
        file.unlink()
    assert after(watch, 9) is None


@pytest.mark.parametrize(("version", "limited"), [(V2, True), (V1, False), (V2, False)])
def test_only_the_kernels_kills_in_the_servers_cgroup_count(kernel, limits, version, limited):
    limit = GIB if limited else "max" if version is V2 else 9223372036854771712
    kernel.write("proc/vmstat", "nr_free_pages 1\noom_kill 2\n")
    kernel.group(version, limit, 1 << 20, kills=2)
    watch = MemoryWatch(limits, kernel.root, around=True)
    kernel.write("proc/vmstat", "nr_free_pages 1\noom_kill 3\n")
    assert watch.killed() == ""
    kernel.group(version, limit, 1 << 20, kills=3)
    place = "the container's or cgroup's limit" if limited else "this machine"
    assert watch.killed() == f"the kernel killed 1 of its processes for memory: {place} was used up"


@pytest.mark.parametrize(("text", "total", "end"), [("", SPARK, 3 * GIB), ("2", SPARK, 2 * GIB), ("", GIB, GIB // 10)])
def test_the_bound_can_be_moved_and_is_smaller_on_small_machines(text, total, end):
    limits = thresholds.configured({thresholds.VARIABLE: text})
    assert (limits.end_below(total), limits.kill_below(total)) == (end, end // 2)


def test_the_dashboard_draws_the_bound_of_the_table():
    limits = thresholds.load()
    bound = f"clamp_max({limits.end_share:g} * node_memory_MemTotal_bytes, {limits.end_gib:g} * 2 ^ 30)"
    assert f'"expr": "{bound}"' in (ROOT / "deploy/grafana/dashboards/vllm.json").read_text(encoding="utf-8")
