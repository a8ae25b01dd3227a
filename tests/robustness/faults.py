"""Run one scenario repeatedly, each time with another failing disk operation, or a kill at another step.

    PYTHONPATH=tests python -m robustness.faults fetch --faults 300 --kills 100 --seed 1
    PYTHONPATH=tests python -m robustness.faults fetch --case once:17:ENOSPC      # repeats one case, with its output

The process restarts itself with the shim preloaded, loads the scenario once, and forks a child for every run.
"""

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from invoke.exceptions import Exit

from robustness.scenario import mine
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
# Counts of one scenario's runs. `lost`: runs that lost a user's file or accepted an incomplete artifact.
COUNTS = ("operations", "faults", "kills", "declared", "succeeded", "tracebacks", "hangs", "unhealed", "lost", "litter")


class Shared(ctypes.Structure):
    """The shim's counters (struct shared in shim.c)."""

    _fields_ = [("calls", ctypes.c_long), ("tripped", ctypes.c_long), ("path", ctypes.c_char * 512),
                ("kinds", ctypes.c_ubyte * (1 << 20)), ("programs", ctypes.c_int)]  # fmt: skip


class Case(NamedTuple):
    """One way to break a run: mode, number of the operation, error; or `after`, microseconds, for a kill then."""

    mode: str
    number: int = 0
    error: str = "EIO"

    @property
    def kills(self):
        return self.mode in ("kill", "torn", "after")


@dataclass
class Ended:
    """How a run ended: `ok`, `declared`, `traceback`, `killed` or `hang`; its exit code and what it printed."""

    how: str
    code: int = 0
    output: str = ""


def preloaded(module, folder):
    """Run `module` with this process's arguments and the shim preloaded; return its exit code."""
    library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)  # noqa: S607
    environment = {**os.environ, "LD_PRELOAD": str(library), SHIM: "1", SHARED: str(folder / "shared"),
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    return subprocess.run([sys.executable, "-m", module, *sys.argv[1:]], env=environment, check=False).returncode


def exit_code(act, disarm=lambda: None):
    """Return the exit code of the command `act`, or 99 with a traceback; for a child, which must not return."""
    code = 99
    try:
        try:
            command(act)()
            code = 0
        except Exit as error:
            code = error.code
        finally:
            disarm()
    except BaseException:  # noqa: BLE001 - the child must not return into its parent
        traceback.print_exc()
    return code


def print_into(path):
    """Send stdout and stderr to a file."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)


def end(code):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Runner:
    """Runs one scenario in children of this process, below `base`."""

    def __init__(self, scenario, base):
        self.scenario, self.base = scenario, base
        self.work, self.template, self.output = base / "work", base / "template", base / "output"
        self.shim = ctypes.CDLL(None)
        self.shim.shim_shared.restype = ctypes.POINTER(Shared)
        self.shim.shim_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self.shared = self.shim.shim_shared().contents

    def prepare(self):
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

    def reset(self):
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work, symlinks=True)

    def run(self, function, case=None):
        """Run `function(work)` in a child, broken as `case` says; return how it ended."""
        self.shared.calls, self.shared.tripped, self.shared.path, self.shared.programs = 0, -1, b"", 0
        child = os.fork()
        if child == 0:
            self._child(function, case)
        ended = self._wait(child, case)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # programs started by a killed run
        ended.output = self.output.read_text(errors="replace")[-TAIL:]
        done = ended.how in ("ok", "declared") and ended.code < UNSOUND
        if done and "Traceback (most recent call last)" in ended.output:
            ended.how = "traceback"  # in a thread or a started program
        return ended

    def _child(self, function, case):
        os.setsid()
        print_into(self.output)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if case and case.mode in MODES:
            error, programs = getattr(errno, case.error), self.scenario.programs
            self.shim.shim_arm(os.fsencode(self.work), MODES[case.mode], case.number, error, programs)
        end(exit_code(lambda: function(self.work), self.shim.shim_disarm))

    def _wait(self, child, case):
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
        return Ended("killed" if code < 0 else {0: "ok", 99: "traceback"}.get(code, "declared"), code)

    def reference(self):
        """Return the files after an undisturbed run; check that a second run changes nothing."""
        snapshots, name = [], self.scenario.name
        for again in (False, False, True):
            if not again:
                self.reset()
            ended = self.run(self.scenario.act)
            assert ended.how == "ok", f"{name} fails by itself:\n{ended.output}"
            snapshots.append(self.scenario.snapshot(self.work))
        checked = self.run(lambda work: self._judge(work, UNSOUND, self.scenario.judge, self.scenario.healed))
        assert checked.how == "ok", f"{name} is judged wrong by itself:\n{checked.output}"
        first, second, repeated = snapshots
        assert first == second, f"{name} differs from run to run: {differences(first, second)}"
        assert repeated == first, f"{name} is changed by a second run: {differences(first, repeated)}"
        return first

    def cases(self, dice):
        """Return every fault and kill of this scenario, shuffled; the first cases cover each kind of operation."""
        self.reset()
        begun = time.monotonic()
        counted = self.run(self.scenario.act, Case("count"))
        took = time.monotonic() - begun
        assert counted.how == "ok", counted.output
        kinds = list(self.shared.kinds[: self.shared.calls])
        faults, kills = [], [Case("torn", len(kinds))]
        for number, kind in enumerate(kinds, 1):
            faults += [Case("once", number, error) for error in (ERRORS[1:] if kind in READING else ERRORS)]
            if kind not in READING:
                faults.append(Case("onwards", number, "ENOSPC"))
                kills.append(Case("kill", number))
            if KINDS[kind] == "write":
                faults += [Case("short", number, error) for error in ERRORS[:2]]
                kills.append(Case("torn", number))
        dice.shuffle(faults)
        dice.shuffle(kills)
        kills += [Case("after", dice.randrange(int(took * 1e6))) for _ in range(len(kills))]
        return len(kinds), _of_each_kind_first(faults, kinds), _of_each_kind_first(kills, kinds)

    def attack(self, case, reference, counts):
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
        counts["kills" if case.kills else "faults"] += 1
        counts["succeeded"] += ended.how == "ok"
        counts["declared"] += ended.how == "declared"
        broken = []  # (count, promise, detail)
        if ended.how == "traceback":
            broken.append(("tracebacks", "it ends with a traceback", ended.output))
        if ended.how == "hang":
            broken.append(("hangs", f"it hangs for more than {SECONDS:g} s", ended.output))
        if (left := mine(self.scenario.snapshot(self.work))) != before:
            broken.append(("lost", "files of the user are gone or changed", differences(before, left)))
        broken += self._heal(before, reference, ended)
        name = self.scenario.name
        shown = ":".join(map(str, case))
        for count, promise, detail in broken:
            counts[count] += 1
            counts["failures"].append(failure(name, operation, promise, detail, f"--case {shown}"))
        return ended

    def _heal(self, before, reference, ended):
        """Check a broken run's files, run again and check again, in one child, as forking takes most of the time."""
        healing = self.run(self._healing)
        after = self.scenario.snapshot(self.work)
        more = sorted(after.keys() - reference.keys())
        unsound = f"{healing.output}\n--- after a run that printed\n{ended.output}"
        findings = (  # condition, count, what is broken, detail; the first one that holds counts
            (healing.code == UNSOUND, "lost", "what it left is not sound", unsound),
            (healing.code == STILL_UNSOUND, "unhealed", "after the next run it is not sound", healing.output),
            (healing.how != "ok", "unhealed", "the next run does not heal it", healing.output),
            (mine(after) != before, "lost", "healing takes files of the user", differences(before, mine(after))),
            (more, "litter", "something is left behind for ever", "\n".join(more)),
            (after != reference, "unhealed", "after the next run it is another state", differences(reference, after)),
        )
        return [finding for holds, *finding in findings if holds][:1]

    def _healing(self, work):
        self._judge(work, UNSOUND, self.scenario.judge)
        self.scenario.act(work)
        self._judge(work, STILL_UNSOUND, self.scenario.judge, self.scenario.healed)

    @staticmethod
    def _judge(work, code, *checks):
        try:
            for check in checks:
                check(work)
        except Exception:  # noqa: BLE001 - an oracle that cannot read what there is has found something
            traceback.print_exc()
            raise Exit(code=code) from None


def failure(name, operation, broken, detail, options):
    repeat = f"PYTHONPATH=tests {sys.executable} -m robustness.faults {name} {options}"
    return {"scenario": name, "operation": operation, "broken": broken, "detail": detail, "repeat": repeat}


def _cpu_seconds(child):
    """Return the CPU time of a process and of the children that it waited for."""
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def differences(wanted, got):
    names = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    return "\n".join(f"{name}: {wanted.get(name, 'absent')} → {got.get(name, 'absent')}" for name in names[:20])


def campaign(scenario, base, options):
    counts, begun = {"scenario": scenario.name, **dict.fromkeys(COUNTS, 0), "failures": []}, time.monotonic()
    runner = Runner(scenario, base)
    with scenario.serve(runner.work):
        runner.prepare()
        try:
            reference = runner.reference()
        except AssertionError as error:
            counts["unhealed"] += 1
            options = "--faults 0 --kills 0"
            counts["failures"].append(failure(scenario.name, "undisturbed", "it fails by itself", str(error), options))
            return counts
        if options.case:
            mode, number, error = options.case.split(":")
            ended = runner.attack(Case(mode, int(number), error), reference, counts)
            sys.stderr.write(f"{ended.how} {ended.code}\n{ended.output}\n")
        else:
            dice = random.Random(f"{options.seed} {scenario.name}")  # noqa: S311
            counts["operations"], faults, kills = runner.cases(dice)
            chosen = faults[: scaled(options.faults, scenario)], kills[: scaled(options.kills, scenario)]
            # Evenly mixed, so that the deadline cuts both equally.
            mixed = [(index / len(cases), case) for cases in chosen for index, case in enumerate(cases)]
            for _, case in sorted(mixed, key=lambda pair: pair[0]):
                if time.monotonic() > begun + options.seconds:
                    break
                runner.attack(case, reference, counts)
    counts["seconds"] = round(time.monotonic() - begun, 1)
    return counts


def _of_each_kind_first(cases, kinds):
    """Return the cases in rounds; each round has one case of each kind of operation, and one kill at any moment."""
    seen, rounds = Counter(), []
    for case in cases:
        kind = case.mode if case.mode == "after" else KINDS[kinds[case.number - 1]]
        rounds.append(seen[kind])
        seen[kind] += 1
    return [case for _, case in sorted(zip(rounds, cases, strict=True), key=lambda pair: pair[0])]


def apart(names, base, job):
    """Run `job(scenario, folder)` for each name in a child, as a scenario changes its process; return the counts."""
    rows = []
    for name in names:
        folder, answer = base / name, base / f"{name}.json"
        folder.mkdir()
        child = os.fork()
        if child == 0:
            try:
                answer.write_text(json.dumps(job(SCENARIOS[name], folder)))
            except BaseException:  # noqa: BLE001 - the child must not return into its parent
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)
        if not answer.exists():
            raise SystemExit(f"{name} did not run")
        rows.append(json.loads(answer.read_text()))
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def scaled(count, scenario):
    return count and max(1, int(count / scenario.cost))


def report(rows, output):
    """Write the counts to `output`, and print them and one failure of each kind; return the exit code."""
    if output:
        output.write_text(json.dumps(rows, indent=2))
    for row in rows:
        sys.stdout.write(json.dumps({name: value for name, value in row.items() if name != "failures"}) + "\n")
        for found in {(entry["operation"].split()[0], entry["broken"]): entry for entry in row["failures"]}.values():
            lines = [*found["detail"].strip().splitlines()[-12:], found["repeat"]]
            shown = "".join(f"    {line}\n" for line in lines)
            sys.stderr.write(f"{row['scenario']}, {found['operation']}: {found['broken']}\n{shown}")
    return 1 if any(row["failures"] for row in rows) else 0


def run_apart(module, options, job):
    """Restart `module` with the shim, then run `job` for each scenario of the options; return the exit code."""
    base = Path(tempfile.mkdtemp(prefix="sparkforge-robustness-")).resolve()
    try:
        if not os.environ.get(SHIM):
            return preloaded(module, base)
        return report(apart(options.scenarios, base, job), options.json)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS))
    parser.add_argument("--faults", type=int, default=1 << 30, help="for a scenario of cost 1; others get fewer")
    parser.add_argument("--kills", type=int, default=1 << 30, help="likewise")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    return run_apart("robustness.faults", options, lambda scenario, folder: campaign(scenario, folder, options))


if __name__ == "__main__":
    sys.exit(main())
