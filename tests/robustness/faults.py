"""Run one scenario repeatedly, each time with another failing disk operation, or a kill at another step.

    PYTHONPATH=tests python -m robustness.faults fetch --faults 300 --kills 100 --seed 1
    PYTHONPATH=tests python -m robustness.faults fetch --case once:17:ENOSPC      # repeats one case, with its output

The process restarts itself with the shim preloaded, loads the scenario once, and forks a child for every run.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from invoke.exceptions import Exit

from robustness.scenario import Scenario, mine
from robustness.scenarios import SCENARIOS
from sparkforge.cli.command import command

SHIM, SHARED = "SPARKFORGE_ROBUSTNESS_SHIM", "SPARKFORGE_ROBUSTNESS_SHARED"
MODES = {"count": 0, "once": 1, "onwards": 2, "short": 3, "kill": 4, "torn": 5}
KINDS = ("open-read", "open-write", "read", "write", "sync", "rename", "unlink", "rmdir", "mkdir", "link", "truncate",
         "chmod", "listdir")  # fmt: skip
READING = {KINDS.index(name) for name in ("open-read", "read", "listdir")}
ERRORS = ("ENOSPC", "EIO", "EACCES")
SECONDS = 5.0  # a run with more CPU time counts as hanging; not wall time, because other programs use the machine
WALL = 12 * SECONDS
UNSOUND, STILL_UNSOUND = 96, 97  # exit codes of the checks after a run
TAIL = 4000  # characters kept of a run's output


class Shared(ctypes.Structure):
    """The shim's counters (struct shared in shim.c)."""

    _fields_ = [("calls", ctypes.c_long), ("tripped", ctypes.c_long), ("path", ctypes.c_char * 512),
                ("kinds", ctypes.c_ubyte * (1 << 20)), ("programs", ctypes.c_int)]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One way to break a run: `mode:N:error`, or `after:microseconds` for a kill at that moment."""

    mode: str
    number: int = 0
    error: str = "EIO"

    def __str__(self) -> str:
        return f"{self.mode}:{self.number}:{self.error}"

    @classmethod
    def parse(cls, text: str) -> Case:
        mode, number, error = text.split(":")
        return cls(mode, int(number), error)

    @property
    def kills(self) -> bool:
        return self.mode in ("kill", "torn", "after")


@dataclass
class Ended:
    """How a run ended: `ok`, `declared`, `traceback`, `killed` or `hang`; its exit code and what it printed."""

    how: str
    code: int = 0
    output: str = ""


@dataclass
class Failure:
    scenario: str
    case: str
    operation: str
    broken: str
    detail: str
    repeat: str


@dataclass
class Counts:
    """Counts of one scenario's runs and results."""

    scenario: str
    operations: int = 0
    faults: int = 0
    kills: int = 0
    declared: int = 0
    succeeded: int = 0
    tracebacks: int = 0
    hangs: int = 0
    unhealed: int = 0
    lost: int = 0  # runs that lost a user's file or accepted an incomplete artifact
    litter: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)


def preload(folder: Path) -> Path:
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)  # noqa: S607
    return library


def preloaded(module: str, folder: Path) -> int:
    """Run `module` with this process's arguments and the shim preloaded; return its exit code."""
    environment = {**os.environ, "LD_PRELOAD": str(preload(folder)), SHIM: "1", SHARED: str(folder / "shared"),
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    arguments = [sys.executable, "-m", module, *sys.argv[1:]]
    return subprocess.run(arguments, env=environment, check=False).returncode


class Runner:
    """Runs one scenario in children of this process, below `base`."""

    def __init__(self, scenario: Scenario, base: Path) -> None:
        self.scenario, self.base = scenario, base
        self.work, self.template, self.output = base / "work", base / "template", base / "output"
        self.shim = ctypes.CDLL(None)
        self.shim.shim_shared.restype = ctypes.POINTER(Shared)
        self.shim.shim_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self.shared = self.shim.shim_shared().contents

    def prepare(self) -> None:
        """Make the inputs and store them; every run begins with a copy."""
        for name in ("home", "tmp"):
            (self.work / name).mkdir(parents=True)
        os.environ |= {
            "SPARKFORGE_STATE": str(self.work / "state"), "SPARKFORGE_CACHE": str(self.work / "cache"),
            "HOME": str(self.work / "home"), "TMPDIR": str(self.work / "tmp"), "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        tempfile.tempdir = None
        self.scenario.prepare(self.work)
        self.work.rename(self.template)
        gc.collect()
        gc.freeze()

    def reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work, symlinks=True)

    def run(self, function: Callable[[Path], None], case: Case | None = None) -> Ended:
        """Run `function(work)` in a child, broken as `case` says; return how it ended."""
        self.shared.calls, self.shared.tripped, self.shared.path, self.shared.programs = 0, -1, b"", 0
        child = os.fork()
        if child == 0:
            self._child(function, case)
        ended = self._wait(child, case)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # programs started by a killed run
        ended.output = self.output.read_text(errors="replace")[-TAIL:]
        if (
            ended.how in ("ok", "declared")
            and ended.code < UNSOUND
            and "Traceback (most recent call last)" in ended.output
        ):
            ended.how = "traceback"  # in a thread or a started program
        return ended

    def _child(self, function: Callable[[Path], None], case: Case | None) -> None:
        code = 99
        try:
            os.setsid()
            output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if case and case.mode in MODES:
                error = getattr(errno, case.error)
                programs = self.scenario.programs
                self.shim.shim_arm(os.fsencode(self.work), MODES[case.mode], case.number, error, programs)
            try:
                command(function)(self.work)
                code = 0
            except Exit as error:
                code = error.code
            finally:
                self.shim.shim_disarm()
        except BaseException:  # noqa: BLE001 - the child must not return into the runner
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _wait(self, child: int, case: Case | None) -> Ended:
        begun, used = time.monotonic(), 0.0
        kill_at = begun + case.number / 1e6 if case and case.mode == "after" else None
        while True:
            pid, status, _ = os.wait4(child, os.WNOHANG)
            now = time.monotonic()
            if pid:
                break
            if kill_at and now >= kill_at:
                os.kill(child, signal.SIGKILL)
                self.shared.tripped = 0
                kill_at = None
            if now - begun > SECONDS:
                used = _cpu_seconds(child)
            if used > SECONDS or now - begun > WALL:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return Ended("hang")
            time.sleep(0.0005 if now - begun < 0.1 else 0.005)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return Ended("killed", code)
        return Ended({0: "ok", 99: "traceback"}.get(code, "declared"), code)

    def reference(self) -> dict[str, str]:
        """Return the files after an undisturbed run; check that a second run changes nothing."""
        snapshots = []
        for again in (False, False, True):
            if not again:
                self.reset()
            ended = self.run(self.scenario.act)
            assert ended.how == "ok", f"{self.scenario.name} fails by itself:\n{ended.output}"
            snapshots.append(self.scenario.snapshot(self.work))
        checked = self.run(lambda work: self._judge(work, UNSOUND, self.scenario.judge, self.scenario.healed))
        assert checked.how == "ok", f"{self.scenario.name} is judged wrong by itself:\n{checked.output}"
        first, second, repeated = snapshots
        assert first == second, f"{self.scenario.name} differs from run to run: {differences(first, second)}"
        assert repeated == first, f"{self.scenario.name} is changed by a second run: {differences(first, repeated)}"
        return first

    def cases(self, dice: random.Random) -> tuple[list[Case], list[Case]]:
        """Return every fault and kill of this scenario, shuffled; the first cases cover each kind of operation."""
        self.reset()
        begun = time.monotonic()
        counted = self.run(self.scenario.act, Case("count"))
        took = time.monotonic() - begun
        assert counted.how == "ok", counted.output
        self.operations = self.shared.calls
        kinds = list(self.shared.kinds[: self.operations])
        faults, kills = [], []
        for number, kind in enumerate(kinds, 1):
            faults += [Case("once", number, error) for error in (ERRORS[1:] if kind in READING else ERRORS)]
            if kind not in READING:
                faults.append(Case("onwards", number, "ENOSPC"))
                kills.append(Case("kill", number))
            if KINDS[kind] == "write":
                faults += [Case("short", number, error) for error in ERRORS[:2]]
                kills.append(Case("torn", number))
        kills.append(Case("torn", self.operations))
        dice.shuffle(faults)
        dice.shuffle(kills)
        kills += [Case("after", dice.randrange(int(took * 1e6))) for _ in range(len(kills))]
        return _of_each_kind_first(faults, kinds), _of_each_kind_first(kills, kinds)

    def attack(self, case: Case, reference: dict[str, str], counts: Counts) -> Ended:
        """Break one run and check the files, then let another run recover and check again."""
        self.reset()
        before = mine(self.scenario.snapshot(self.template))
        ended = self.run(self.scenario.act, case)
        operation = "at that moment"
        if case.mode != "after":
            tripped = self.shared.tripped
            if tripped < 0 and ended.how != "hang":
                return ended  # this run had fewer operations
            operation = f"{KINDS[tripped]} {os.fsdecode(self.shared.path)}".strip()
        counts.kills += case.kills
        counts.faults += not case.kills
        counts.succeeded += ended.how == "ok"
        counts.declared += ended.how == "declared"
        broken = list[tuple[str, str]]()
        if ended.how == "traceback":
            counts.tracebacks += 1
            broken.append(("it ends with a traceback", ended.output))
        if ended.how == "hang":
            counts.hangs += 1
            broken.append((f"it hangs for more than {SECONDS:g} s", ended.output))
        if (left := mine(self.scenario.snapshot(self.work))) != before:
            counts.lost += 1
            broken.append(("files of the user are gone or changed", differences(before, left)))
        broken += self._heal(before, reference, counts, ended)
        repeat = f"PYTHONPATH=tests {sys.executable} -m robustness.faults {self.scenario.name} --case {case}"
        counts.failures += [
            Failure(self.scenario.name, str(case), operation, promise, detail, repeat) for promise, detail in broken
        ]
        return ended

    def _heal(
        self, before: dict[str, str], reference: dict[str, str], counts: Counts, ended: Ended
    ) -> list[tuple[str, str]]:
        """Check a broken run's files, run again and check again, in one child, as forking takes most of the time."""
        healing = self.run(self._healing)
        after = self.scenario.snapshot(self.work)
        more = sorted(after.keys() - reference.keys())
        if healing.how == "declared" and healing.code == UNSOUND:
            counts.lost += 1
            failure = ("what it left is not sound", f"{healing.output}\n--- after a run that printed\n{ended.output}")
        elif healing.how == "declared" and healing.code == STILL_UNSOUND:
            counts.unhealed += 1
            failure = ("after the next run it is not sound", healing.output)
        elif healing.how != "ok":
            counts.unhealed += 1
            failure = ("the next run does not heal it", healing.output)
        elif mine(after) != before:
            counts.lost += 1
            failure = ("healing takes files of the user", differences(before, mine(after)))
        elif more:
            counts.litter += 1
            failure = ("something is left behind for ever", "\n".join(more))
        elif after != reference:
            counts.unhealed += 1
            failure = ("after the next run it is another state", differences(reference, after))
        else:
            return []
        return [failure]

    def _healing(self, work: Path) -> None:
        self._judge(work, UNSOUND, self.scenario.judge)
        self.scenario.act(work)
        self._judge(work, STILL_UNSOUND, self.scenario.judge, self.scenario.healed)

    @staticmethod
    def _judge(work: Path, code: int, *checks: Callable[[Path], None]) -> None:
        try:
            for check in checks:
                check(work)
        except Exception:  # noqa: BLE001 - an oracle that cannot read what there is has found something
            traceback.print_exc()
            raise Exit(code=code) from None


def _cpu_seconds(child: int) -> float:
    """Return the CPU time of a process and of the children that it waited for."""
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def differences(wanted: dict[str, str], got: dict[str, str]) -> str:
    names = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    return "\n".join(f"{name}: {wanted.get(name, 'absent')} → {got.get(name, 'absent')}" for name in names[:20])


def campaign(scenario: Scenario, base: Path, options: argparse.Namespace) -> Counts:
    counts, begun = Counts(scenario.name), time.monotonic()
    runner = Runner(scenario, base)
    with scenario.serve(runner.work):
        runner.prepare()
        try:
            reference = runner.reference()
        except AssertionError as error:
            counts.unhealed += 1
            repeat = f"PYTHONPATH=tests {sys.executable} -m robustness.faults {scenario.name} --faults 0 --kills 0"
            counts.failures.append(
                Failure(scenario.name, "none", "undisturbed", "it fails by itself", str(error), repeat)
            )
            return counts
        if options.case:
            ended = runner.attack(Case.parse(options.case), reference, counts)
            sys.stderr.write(f"{ended.how} {ended.code}\n{ended.output}\n")
        else:
            faults, kills = runner.cases(random.Random(f"{options.seed} {scenario.name}"))  # noqa: S311
            counts.operations = runner.operations
            deadline = begun + options.seconds
            for case in _interleaved(
                faults[: scaled(options.faults, scenario)], kills[: scaled(options.kills, scenario)]
            ):
                if time.monotonic() > deadline:
                    break
                runner.attack(case, reference, counts)
    counts.seconds = round(time.monotonic() - begun, 1)
    return counts


def _of_each_kind_first(cases: list[Case], kinds: Sequence[int]) -> list[Case]:
    """Return the cases in rounds; each round has one case of each kind of operation, and one kill at any moment."""
    seen = Counter[str]()
    rounds = []
    for case in cases:
        kind = case.mode if case.mode == "after" else KINDS[kinds[case.number - 1]]
        rounds.append(seen[kind])
        seen[kind] += 1
    return [case for _, case in sorted(zip(rounds, cases, strict=True), key=lambda pair: pair[0])]


def _interleaved(faults: list[Case], kills: list[Case]) -> list[Case]:
    """Return both lists evenly mixed, so that a deadline cuts both equally."""
    placed = [(index / len(cases), case) for cases in (faults, kills) for index, case in enumerate(cases)]
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


def show(failures: Sequence[Failure]) -> str:
    lines = []
    seen = Counter((failure.operation.split()[0], failure.broken) for failure in failures)
    for failure in failures:
        key = (failure.operation.split()[0], failure.broken)
        if seen[key]:
            lines += [f"{failure.scenario}, {failure.case}, {failure.operation}: {failure.broken} (x{seen[key]})",
                      *(f"    {line}" for line in failure.detail.strip().splitlines()[-12:]),
                      f"    {failure.repeat}"]  # fmt: skip
            seen[key] = 0
    return "\n".join(lines)


def apart(names: Sequence[str], base: Path, job: Callable[[Scenario, Path], Any]) -> list[dict[str, Any]]:
    """Run `job(scenario, folder)` for each name in a child, as a scenario changes its process; return the counts."""
    rows = []
    for name in names:
        folder, answer = base / name, base / f"{name}.json"
        folder.mkdir()
        child = os.fork()
        if child == 0:
            try:
                answer.write_text(json.dumps(asdict(job(SCENARIOS[name], folder))))
            except BaseException:  # noqa: BLE001 - the child must not return into its parent
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)
        if not answer.exists():
            raise SystemExit(f"{name} did not run")
        rows.append(json.loads(answer.read_text()))
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def scaled(count: int, scenario: Scenario) -> int:
    return count and max(1, int(count / scenario.cost))


def report(rows: list[dict[str, Any]], output: Path | None) -> int:
    if output:
        output.write_text(json.dumps(rows, indent=2))
    for row in rows:
        sys.stdout.write(json.dumps({name: value for name, value in row.items() if name != "failures"}) + "\n")
    return 1 if any(row["failures"] for row in rows) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS))
    parser.add_argument("--faults", type=int, default=1 << 30, help="for a scenario of cost 1; others get fewer")
    parser.add_argument("--kills", type=int, default=1 << 30, help="likewise")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="sparkforge-robustness-")).resolve()
    try:
        if not os.environ.get(SHIM):
            return preloaded("robustness.faults", base)
        rows = apart(options.scenarios, base, lambda scenario, folder: campaign(scenario, folder, options))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    for row in rows:
        if shown := show([Failure(**failure) for failure in row["failures"]]):
            sys.stderr.write(f"{shown}\n")
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
