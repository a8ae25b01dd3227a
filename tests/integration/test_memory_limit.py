"""The planner under a real cgroup limit: never over it, and what the kernel really kills is noticed."""

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sparkforge.core.memory import groups
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration
MB = 10**6
LIMIT = 700 * MB
PROGRAM = """
import json, sys
from pathlib import Path
from sparkforge.compile import jobs
from sparkforge.core import memory
from sparkforge.compile.jobs import Site, Unit
from sparkforge.compile.peaks import Cost, Peaks
jobs.RESERVE, jobs.SAMPLE = 100_000_000, 0.1
predicted, held, count = map(int, sys.argv[1:])
peaks = Peaks("test")
code = f"import time; held = b'x' * {held}; time.sleep(1)"
units = [Unit(f"u{n}", (sys.executable, "-S", "-c", code)) for n in range(count)]
peaks.learnt = {unit.name: Cost(predicted, 1.0) for unit in units}
events = []
plan = jobs.make_schedule([unit.name for unit in units], peaks, memory.Machine(memory.measure().available, 8))
watch = lambda stage, unit, done: events.append(stage)
report = jobs.run(units, plan, peaks, Site({}, Path("logs"), Path("lock")), watch)
retried = sum(done.retried for done in report.units.values())
print(json.dumps({"budget": plan.budget, "units": len(report.units), "retried": retried, "events": events}))
"""


@pytest.fixture
def limited():
    """A memory cgroup with a limit below our own; skipped where this user may not make one."""
    for flavour, limit in (("cgroup", "memory.limit_in_bytes"), ("cgroup2", "memory.max")):
        for parent in groups(Path("/"), flavour, "memory"):
            group = parent / f"sparkforge-test-{uuid.uuid4().hex}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                (group / limit).write_text(str(LIMIT))
                yield group
            except OSError:
                continue
            else:
                return
            finally:
                group.rmdir()
    pytest.skip("this user may not make a memory cgroup; root on a machine with the memory controller may")


def go(group, tmp_path, *numbers):
    command = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    result = subprocess.run(
        ["/bin/sh", "-c", command, "sh", sys.executable, "-c", PROGRAM, *map(str, numbers)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "SPARKFORGE_STATE": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def most_used(group):
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((group / name).read_text()) for name in names if (group / name).exists())


def test_what_is_predicted_right_stays_below_the_limit_and_nothing_is_killed(limited, tmp_path):
    result = go(limited, tmp_path, 130 * MB, 110 * MB, 10)
    assert result["budget"] < LIMIT
    assert (result["units"], result["retried"]) == (10, 0)
    assert set(result["events"]) == {"started", "done"}
    assert 300 * MB < most_used(limited) < LIMIT


def test_what_is_predicted_wrong_is_killed_by_the_kernel_and_built_alone(limited, tmp_path):
    result = go(limited, tmp_path, 100 * MB, 400 * MB, 3)
    assert result["units"] == 3
    assert result["retried"] >= 1
    assert "killed" in result["events"]
