import itertools
import re
import sys
import time

import pytest
from expected import refused
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.compile import jobs
from sparkforge.compile.jobs import RESERVE, Cost, Site, Unit, Waiting
from sparkforge.compile.ninja import explained
from sparkforge.core.errors import ProcessError, UsageError
from sparkforge.core.memory import Machine
from sparkforge.core.process import started_at

MB = 10**6
GIB = 1 << 30


def costs(*sizes):
    return {f"u{number}": Cost(size, 1.0 + number % 3) for number, size in enumerate(sizes)}


def schedule(known, budget, cores=4, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "cost", known.__getitem__)
        return jobs.make_schedule(known, Machine(budget + RESERVE, cores), **options)


# --- the plan ---


@pytest.mark.parametrize(
    ("available", "cores", "expected"),
    [(119 * GIB, 20, 11), (24 * GIB, 2, 2), (24 * GIB, 20, 2), (20 * GIB, 2, 1), (1 << 40, 20, 20)],
)  # fmt: skip
def test_max_jobs_is_what_cores_and_the_hungriest_unit_allow(available, cores, expected):
    scheduled = jobs.make_schedule(["fused_moe_120/gemm_grouped_sm120_group6.cuda.o"], Machine(available, cores))
    assert scheduled.max_jobs == expected


sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=25)


@given(sizes, st.integers(0, 3000), st.integers(1, 8), st.randoms())
def test_never_over_budget_every_unit_once_hungriest_first(peaks_, spare, cores, random):
    scheduled = schedule(costs(*peaks_), max(peaks_) + spare, cores)
    queue, running, order = Waiting(scheduled), set(), []
    while queue.units or running:
        while (unit := queue.take(running, scheduled.budget)) is not None:
            running.add(unit)
            order.append(unit)
            assert sum(scheduled.costs[name].peak for name in running) <= scheduled.budget
            assert len(running) <= cores
        assert running  # until all units have run, at least one runs
        if queue.units:  # smaller units never delay a larger one, which fits once the larger running units end
            first = scheduled.costs[queue.units[0]].peak
            smaller = [scheduled.costs[name].peak for name in running if scheduled.costs[name].peak < first]
            assert sum(smaller) + first <= scheduled.budget
        running.remove(random.choice(sorted(running)))
    assert sorted(order) == sorted(scheduled.costs)
    assert scheduled.costs[order[0]].peak == max(peaks_)


def test_the_expected_time_is_that_of_the_schedule():
    known = costs(60, 60, 30)  # 1, 2 and 3 CPU-seconds
    assert schedule(known, 200).seconds() == 3.0
    assert schedule(known, 60).seconds() == 6.0
    assert schedule(known, 60).seconds(finished=["u2"]) == 3.0


# --- running it: real processes ---


def holding(megabytes, seconds=0.3):
    code = f"import time; held = b'x' * {megabytes * MB}; time.sleep({seconds})"
    return (sys.executable, "-S", "-c", code)


class Watcher:
    """Records events, and the predicted memory of all running units at each start."""

    def __init__(self, plan):
        self.plan, self.events, self.running, self.sums = plan, [], set(), []

    def __call__(self, stage, unit, _):
        self.events.append((stage, unit.name))
        (self.running.add if stage == "started" else self.running.discard)(unit.name)
        self.sums.append(sum(self.plan.costs[name].peak for name in self.running))


def site(folder):
    return Site({}, folder / "logs", folder / "lock")


def go(plan, commands, tmp_path, **options):
    units = [Unit(f"u{number}", tuple(command), tmp_path) for number, command in enumerate(commands)]
    watcher = Watcher(plan)
    options.setdefault("machine", lambda: Machine(1 << 40, 4))
    try:
        return jobs.run(units, plan, site(tmp_path), watcher, **options), watcher
    except Exception as error:
        error.watcher = watcher
        raise


@pytest.mark.slow
def test_real_programs_stay_within_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "SAMPLE", 0.05)
    known = costs(*[160 * MB] * 5)
    scheduled = schedule(known, 350 * MB, cores=8)
    report, watcher = go(scheduled, [holding(120)] * 5, tmp_path)
    assert sorted(report.units) == [f"u{number}" for number in range(5)]
    assert max(watcher.sums) == 320 * MB  # two at once, never three
    assert 120 * MB <= report.peak <= 350 * MB
    assert all(result.usage.peak >= 120 * MB for result in report.units.values())


def test_a_hit_of_ccache_is_told(tmp_path):
    known = costs(MB)
    hit = ("sh", "-c", "printf '# x.cu\\ndirect_cache_hit\\nlocal_storage_hit\\n' > $CCACHE_STATSLOG")
    report, watcher = go(schedule(known, 10 * GIB), [hit], tmp_path)
    assert report.units["u0"].cached
    assert watcher.events[-1] == ("cached", "u0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["kill -9 $$", "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1"]
)
def test_a_killed_compiler_is_tried_again_alone(tmp_path, how):
    known, flag = costs(30, 20, 10), tmp_path / "flag"
    killed_once = ("sh", "-c", f"test -e {flag} && exit 0; touch {flag}; {how}")
    commands = [killed_once, holding(1, 0.5), holding(1, 0)]
    report, watcher = go(schedule(known, GIB, cores=2), commands, tmp_path)
    assert sorted(report.units) == ["u0", "u1", "u2"]
    assert report.units["u0"].retried
    again = len(watcher.events) - 1 - watcher.events[::-1].index(("started", "u0"))
    assert watcher.events[again - 1] == ("done", "u1"), "it waits until nothing else runs"
    assert watcher.events[again + 1] == ("done", "u0"), "and nothing starts beside it"


def test_a_compiler_killed_twice_is_out_of_memory_with_the_unit_and_the_next_setting(tmp_path):
    known = costs(2 * GIB)
    with refused("compile.killed", "u0.* · .*out of memory.*2.1 GB predicted.* · .*--jobs 1") as caught:
        go(schedule(known, 3 * GIB), [("sh", "-c", "kill -9 $$")], tmp_path)
    assert [stage for stage, _ in caught.value.watcher.events] == ["started", "killed"] * 2


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [(0, "Killed\n", False), (1, 'x.cu(3): error: name followed by "Killed"\n', False), (2, "", False),
     (-9, "", True), (137, "", True), (255, "", False), (255, "nvcc error : 'cicc' died due to signal 9\n", True),
     (1, "error: static assertion failed: out of memory\n", False), (4, "1 catastrophic error: out of memory\n", True)],
)  # fmt: skip
def test_what_counts_as_killed(code, output, expected):
    assert jobs.was_killed(code, output) is expected


def test_an_error_in_the_source_is_reported_after_the_others_end(tmp_path):
    known = costs(30, 20, 10)
    commands = [("sh", "-c", "echo 'x.cu(1): error: no such thing'; exit 2"), holding(1, 0.5), holding(1)]
    with refused("process.failed", r"u0 ended with code 2 · x.cu\(1\): error: no such thing") as caught:
        go(schedule(known, GIB, cores=2), commands, tmp_path)
    assert ("done", "u1") in caught.value.watcher.events
    assert ("started", "u2") not in caught.value.watcher.events


def test_a_unit_that_cannot_fit_stops_the_build_before_it_starts(tmp_path):
    known = costs(GIB, 3 * GIB)
    with refused("compile.memory", "u1 does not fit") as caught:
        go(schedule(known, 2 * GIB), [holding(1), holding(1)], tmp_path)
    assert caught.value.watcher.events == []


def test_missing_memory_is_waited_for_and_then_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PATIENCE", 3 * jobs.SAMPLE)
    known = costs(2 * GIB, GIB)
    plan, commands = schedule(known, 2 * GIB), [holding(1, 0), holding(1, 0)]
    with refused("compile.memory", "u0"):
        go(plan, commands, tmp_path, machine=lambda: Machine(RESERVE + GIB, 4))
    sizes = itertools.chain([GIB] * 2, itertools.repeat(3 * GIB))
    report, _ = go(plan, commands, tmp_path, machine=lambda: Machine(RESERVE + next(sizes), 4))
    assert len(report.units) == 2


def test_nothing_is_left_running_after_an_interruption(tmp_path):
    known = costs(2, 1)
    pids = tmp_path / "pids"
    command = ("sh", "-c", f"sleep 600 & echo $! >> {pids}; wait")

    def interrupt():
        if pids.exists() and len(pids.read_text().split()) == 2:
            raise KeyboardInterrupt
        time.sleep(0.1)
        return Machine(1 << 40, 4)

    with pytest.raises(KeyboardInterrupt):
        go(schedule(known, GIB), [command] * 2, tmp_path, machine=interrupt)
    assert [started_at(int(pid)) for pid in pids.read_text().split()] == [None, None]


def test_a_compiler_is_the_kernels_first_victim(tmp_path):
    known = costs(1)
    wait = f"for n in $(seq 600); do [ $(cat /proc/$$/oom_score_adj) = {jobs.VICTIM} ] && break; sleep 0.1; done"
    go(schedule(known, GIB), [("sh", "-c", f"{wait}; cat /proc/self/oom_score_adj > score")], tmp_path)
    assert (tmp_path / "score").read_text().strip() == jobs.VICTIM


def test_an_invalid_number_of_jobs_is_refused():
    for text in ("0", "-1", "²", "two", ""):
        with pytest.raises(UsageError, match="--jobs"):
            jobs.parse_limit(text)
    assert (jobs.parse_limit("auto"), jobs.parse_limit("3")) == (None, 3)


def test_other_messages_stay():
    for line in ("Feature 'wgmma' not supported on .target 'sm_121'", "expression must have a constant value", ""):
        error = ProcessError("nvcc ended with code 2", line, "run it by hand", code="process.failed")
        assert explained(error) is error


@pytest.mark.parametrize(
    ("printed", "why", "fix"),
    [(f"ptxas x.ptx, line 35; error   : {reason} not supported on .target 'sm_121'",  # ptxas 13.0.88
      f"without the a suffix.*{reason}", "FLASHINFER_CUDA_ARCH_LIST=12.1a.*arch=compute_121a,code=sm_121a")
     for reason in ("Instruction 'cvt with .e2m1x2'", "Feature '.block_scale'")]
    + [("x.cuh:11:10: fatal error: cutlass/numeric_size.h: No such file or directory", "CUTLASS has no cutlass/numeric",
      "unset VLLM_CUTLASS_SRC_DIR"),
     ('gemm.cu:1:2: error: #error "left out of this build: see …"', "a repository that is left out", "--targets"),
     ("  No supported CUDA architectures; the build would produce a binary", "no architecture", "build --from source"),
     ("ptxas fatal   : PTX with .target 'sm_121a' cannot be compiled for architecture 'sm_121'", "sm_121a",
      "nvcc -gencode arch=compute_121a,code=sm_121a")],
)  # fmt: skip
def test_known_errors_of_builds_are_named_with_the_next_step(printed, why, fix):
    explanation = explained(ProcessError("cmake ended with code 1", printed, "read the log", code="process.failed"))
    assert re.search(why, explanation.why)
    assert re.search(fix, explanation.fix)
