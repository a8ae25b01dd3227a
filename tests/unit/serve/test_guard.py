"""What the memory guard sees in the kernel's files, and when it says that a server must end."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time

import pytest

from sparkforge.plan import thresholds
from sparkforge.plan.thresholds import GIB
from sparkforge.serve import guard, supervise
from sparkforge.serve.guard import MemoryWatch, Trouble

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
        with path.open("r+" if path.exists() else "w") as file:  # the same file: the guard keeps it open
            file.write(text)
            file.truncate()

    def memory(self, available, total=SPARK):
        self.write(
            "proc/meminfo", f"MemTotal:  {total // 1024} kB\nMemFree: 1 kB\nMemAvailable:\t {available // 1024} kB\n"
        )

    def stalled(self, microseconds, name="proc/pressure/memory"):
        some = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds + 99}"
        self.write(name, f"{some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds}\n")

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
    """Return what the last of several looks says, one period apart."""
    said = None
    for number in range(looks):
        said = watch.look(begun + number * watch.limits.period_seconds)
    return said


def test_a_machine_with_room_is_left_alone(kernel, limits):
    assert after(MemoryWatch(limits, kernel.root, around=True), 50) is None


def test_little_memory_must_last_and_less_is_an_end_at_once(kernel, limits):
    watch = MemoryWatch(limits, kernel.root)
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
def test_a_containers_limit_counts_without_what_can_be_dropped(kernel, limits, version):
    kernel.group(version, GIB, 950 << 20, cached=400 << 20)
    watch = MemoryWatch(limits, kernel.root, around=True)
    assert after(watch, 9) is None
    kernel.group(version, GIB, 950 << 20, cached=1 << 20)
    trouble = after(watch, int(limits.looks))
    assert trouble.why == "the container's or cgroup's limit has 76 MiB of 1.0 GiB left, under 102 MiB"
    kernel.group(version, "max" if version is V2 else 9223372036854771712, 950 << 20)
    assert after(watch, 9) is None


def test_waiting_for_memory_counts_where_little_is_left(kernel, limits):
    looks = round(limits.stall_seconds / limits.period_seconds)
    for available, ends in ((60 * GIB, False), (20 * GIB, True)):
        kernel.memory(available)
        kernel.stalled(5_000_000)
        watch = MemoryWatch(limits, kernel.root)
        assert after(watch, looks + 5) is None  # what was before the watch is no waiting
        kernel.stalled(5_000_000 + int(limits.stall_seconds * 0.5e6))
        trouble = after(watch, 1, 100 + (looks + 5) * limits.period_seconds)
        assert bool(trouble) is ends
    assert "every task waited for memory" in trouble.why


def test_a_kernel_without_pressure_files_or_limits_is_watched_all_the_same(kernel, limits):
    assert not (kernel.root / "proc/pressure").exists()
    kernel.memory(GIB)
    assert after(MemoryWatch(limits, kernel.root, around=True), 1).now


def test_a_cgroup_that_goes_away_ends_no_watch(kernel, limits):
    kernel.group(V2, GIB, 1 << 20)
    watch = MemoryWatch(limits, kernel.root, around=True)
    for file in (kernel.root / V2[2]).iterdir():
        file.unlink()
    assert after(watch, 3) is None


@pytest.mark.parametrize("version", [V2, V1])
def test_what_the_kernel_killed_is_told(kernel, limits, version):
    kernel.group(version, GIB, 1 << 20, kills=2)
    watch = MemoryWatch(limits, kernel.root, around=True)
    assert watch.killed() == ""
    kernel.group(version, GIB, 1 << 20, kills=3)
    assert watch.killed().startswith("the kernel killed 1 of its processes for memory: the container's")


@pytest.mark.parametrize("version", [V2, V1])
def test_a_kill_elsewhere_on_the_machine_is_not_the_servers(kernel, limits, version):
    kernel.write("proc/vmstat", "nr_free_pages 1\noom_kill 2\n")
    kernel.group(version, "max" if version is V2 else 9223372036854771712, 1 << 20, kills=2)
    watch = MemoryWatch(limits, kernel.root, around=True)
    kernel.write("proc/vmstat", "nr_free_pages 1\noom_kill 3\n")
    assert watch.killed() == ""
    kernel.group(version, "max" if version is V2 else 9223372036854771712, 1 << 20, kills=3)
    assert watch.killed() == "the kernel killed 1 of its processes for memory: this machine was used up"


def test_a_kill_of_long_ago_is_no_reason_where_only_the_machine_counts(kernel, limits):
    kernel.write("proc/vmstat", "nr_free_pages 1\noom_kill 2\n")
    watch, now = MemoryWatch(limits, kernel.root), time.monotonic()
    kernel.write("proc/vmstat", "nr_free_pages 1\noom_kill 3\n")
    assert watch.killed().startswith("the kernel killed 1 ")
    for looks in (1, 2):
        watch.look(now + looks * 2 * guard.RECENT_SECONDS)
    assert watch.killed() == ""


def test_a_look_needs_no_new_page():
    watch = MemoryWatch(thresholds.load(), around=True)
    after(watch, 50)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    after(watch, 500)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100  # a page a look would be 500


@pytest.mark.parametrize(("text", "end"), [("", 3.0), ("2", 2.0), ("0.5", 0.5)])
def test_the_bound_can_be_moved(text, end):
    limits = thresholds.configured({thresholds.VARIABLE: text})
    assert (limits.end_below(SPARK), limits.kill_below(SPARK)) == (end * GIB, end / 2 * GIB)


def test_no_guard_is_asked_for_by_0_and_nonsense_is_refused():
    assert thresholds.configured({thresholds.VARIABLE: "0"}) is None
    for nonsense in ("much", "-1", "nan", "1e9"):
        with pytest.raises(ValueError, match="no number of GiB"):
            thresholds.configured({thresholds.VARIABLE: nonsense})


def test_small_machines_have_smaller_bounds(limits):
    assert limits.end_below(GIB) == GIB // 10
    assert limits.kill_below(GIB) == GIB // 20
    assert limits.kill_below(SPARK) < limits.end_below(SPARK) < 0.03 * SPARK


def test_it_looks_once_from_the_command_line():
    command = [sys.executable, "-m", "sparkforge.serve.guard", "--once"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, thresholds.VARIABLE: "0.001"}
    )
    assert result.returncode == 0, result
    assert "available; servers end under 1 MiB" in result.stdout


def test_locking_says_how_much_is_kept():
    code = "from sparkforge.serve import guard; print(guard.lock_memory())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept = int(result.stdout)
    assert kept >= 0
    if os.geteuid() == 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        assert kept > 1 << 20


# In a process namespace of its own: the guard ends every server that it sees.
GUARDED = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from sparkforge.serve import guard
from sparkforge.serve.supervise import supervised
root, end, pids = (Path(word) for word in sys.argv[1:4])
stopped, gib = sys.argv[4] == "stopped", int(sys.argv[5])
child = "import os, sys, time; os.fork(); open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)"
# With a folder of weights the supervisor has a second process, which tends the page cache.
server = subprocess.Popen(supervised((sys.executable, "-c", child, str(pids)), end, str(root)))
def until(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
code = "import sys; from pathlib import Path; from sparkforge.serve import guard; guard.main([], Path(sys.argv[1]))"
watcher = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
watcher.stdout.readline()
assert server.poll() is None
def lives(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
if stopped:
    os.kill(server.pid, signal.SIGSTOP)
meminfo = root / "proc/meminfo"
meminfo.write_text(meminfo.read_text().replace(f"MemAvailable: {8 << 20} kB", f"MemAvailable: {gib << 20} kB"))
began = time.monotonic()
line = watcher.stdout.readline()
until(lambda: not any(map(lives, pids.read_text().split())))
seconds = time.monotonic() - began
os.kill(server.pid, signal.SIGCONT)
code = server.wait(60)
watcher.terminate()
left = [pid for pid in pids.read_text().split() if os.path.exists(f"/proc/{pid}")]
print(json.dumps({"code": code, "why": json.loads(end.read_text())["why"], "left": left, "line": line,
                  "seconds": seconds}))
"""


@pytest.mark.parametrize(
    ("supervisor", "gib", "line"),
    [
        ("runs", 2, "this machine has 2.0 GiB of 120.0 GiB left, under 3.0 GiB; servers that are ended: 1"),
        ("stopped", 1, "this machine has 1.0 GiB of 120.0 GiB left, and it falls; servers that are ended: 1"),
    ],
)
def test_the_machines_guard_ends_every_process_of_a_server_and_says_why(tmp_path, supervisor, gib, line):
    unshare = ["unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), "--pid", "--fork"]
    unshare += ["--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no process namespace")
    root = tmp_path / "kernel"
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {120 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    command = [*unshare, sys.executable, "-c", GUARDED, root, tmp_path / "end.json", tmp_path / "pids"]
    command += [supervisor, str(gib)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), thresholds.VARIABLE: ""}
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    result = json.loads(completed.stdout.splitlines()[-1])
    assert result["code"] == 24
    assert result["why"].startswith("the machine's memory guard asked for it: ")
    assert not result["left"]
    assert line in result["line"]
    if gib == 1:  # there is no time to wait for who was told
        assert result["seconds"] < 2 * thresholds.load().grace_seconds


def test_a_supervisor_is_known_by_its_command_line():
    process = subprocess.Popen(supervise.supervised((sys.executable, "-c", "import time; time.sleep(600)")))
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    editor = subprocess.Popen([shutil.which("tail"), "-f", supervise.__file__], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while process.pid not in guard._supervisors():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not {other.pid, editor.pid} & set(guard._supervisors())
        guard._signal([other.pid, editor.pid], guard.TELL)  # an id was used again: it is not ours to end
        assert (other.poll(), editor.poll()) == (None, None)
    finally:
        for child in (process, other, editor):
            child.terminate()
            child.wait(60)


class Machine:
    """Stands in for the processes: which supervisors run, and what the guard did to them, by time."""

    def __init__(self, monkeypatch):
        self.running, self.actions = [], []
        monkeypatch.setattr(guard, "_supervisors", lambda: list(self.running))
        monkeypatch.setattr(guard, "_signal", lambda pids, _: self._note("told", pids))
        monkeypatch.setattr(
            guard, "_kill_servers", lambda pids, or_supervisors=False: self._note(f"killed {or_supervisors}", pids)
        )
        self.ending, self.time = guard._Ending(6.0), 0.0

    def _note(self, action, pids):
        if pids:
            self.actions.append((round(self.time, 1), action, list(pids)))

    def look(self, begin, end, *, now=False):
        """Have the guard look ten times a second, and return what it did, anew."""
        self.actions.clear()
        for tenth in range(round(10 * begin), round(10 * end)):
            self.time = tenth / 10
            self.ending.look(Trouble("little", now), self.time)
        return list(self.actions)


def test_a_server_that_starts_while_memory_is_short_is_told_before_it_is_killed(monkeypatch, capsys):
    machine = Machine(monkeypatch)
    assert machine.look(100, 120) == []
    assert capsys.readouterr().out == ""  # no line for ever about no server
    machine.running = [11]
    assert machine.look(120, 124) == [(120.0, "told", [11])]
    machine.running = [11, 12]
    ((first, *notices), (second, *killed)) = machine.look(124, 129)
    assert (notices, killed) == (["told", [12]], ["killed True", [11]])
    assert first < 125
    assert 126 < second < 127.5
    assert capsys.readouterr().out.count("\n") == 3
    machine.running = [12]
    assert [action for _, *action in machine.look(129, 132)] == [["killed True", [12]]]


def test_without_time_servers_are_told_and_killed_in_one_look_and_their_supervisors_are_left_to_say_why(monkeypatch):
    machine = Machine(monkeypatch)
    machine.running = [11]
    assert machine.look(100, 100.3) == [(100.0, "told", [11])]
    assert machine.look(100.3, 105, now=True) == [(100.3, "killed False", [11])]
    machine.running = [11, 12]
    new = machine.look(105, 106.3, now=True)
    assert [action for _, *action in new] == [["told", [12]], ["killed False", [12]]]
    assert new[0][0] == new[1][0]
