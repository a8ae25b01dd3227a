"""Run the same scenario in several processes at once: each succeeds, or ends with its documented refusal.

    PYTHONPATH=tests python -m robustness.races fetch --rounds 20

`storage.busy` is the refusal of stages whose documentation says that only one run at a time makes an artifact. In any
order, the folder is the same as after one run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from invoke.exceptions import Exit

from robustness.faults import SHIM, Runner, apart, differences, preloaded, report, scaled
from robustness.scenario import BUSY, Scenario
from robustness.scenarios import SCENARIOS
from sparkforge.cli.command import command
from sparkforge.core.errors import StorageError

PROCESSES = 4
RACED = [scenario.name for scenario in SCENARIOS.values() if scenario.races]
WALL = 60.0


@dataclass
class Counts:
    """The number of concurrent runs, and how they ended."""

    scenario: str
    runs: int = 0
    succeeded: int = 0
    refused: int = 0  # as documented
    false_refusals: int = 0
    unsound: int = 0
    hangs: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Race(Runner):
    """Several children at once instead of one; `busy` tells whether a child was refused because of another."""

    busy = False

    def together(self) -> list[tuple[int | None, str]]:
        """Start all children, release them together, and return the exit code (None: it hangs) and output of each."""
        read_end, gate = os.pipe()
        children = {os.fork() or self._racer(read_end, gate, number): number for number in range(PROCESSES)}
        os.close(read_end)
        os.close(gate)
        codes: dict[int, int | None] = {}
        deadline = time.monotonic() + WALL
        while children.keys() - codes.keys():
            for child in children.keys() - codes.keys():
                if time.monotonic() > deadline:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    codes[child] = None
                    continue
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        return [(codes[child], self._printed(number).read_text(errors="replace")) for child, number in children.items()]

    def _act(self) -> None:
        try:
            self.scenario.act(self.work)
        except StorageError as error:
            self.busy = error.code == "storage.busy"
            raise

    def _printed(self, number: int) -> Path:
        return self.base / f"output-{number}"

    def _racer(self, read_end: int, gate: int, number: int) -> int:
        code = 99
        try:
            output = os.open(self._printed(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.close(gate)
            os.read(read_end, 1)  # returns when the parent closes its end
            try:
                command(self._act)()
                code = 0
            except Exit as error:
                code = BUSY if self.busy else error.code
        except BaseException:  # noqa: BLE001 - the child must not return into the race
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def campaign(scenario: Scenario, rounds: int, seconds: float, base: Path) -> Counts:
    name, counts, begun = scenario.name, Counts(scenario.name), time.monotonic()
    race = Race(scenario, base)
    with scenario.serve(race.work):
        race.prepare()
        try:
            reference = race.reference()
        except AssertionError as error:
            counts.unsound += 1
            counts.failures.append(str(error))
            return counts
        deadline = time.monotonic() + seconds
        for _ in range(rounds):
            if time.monotonic() > deadline:
                break
            race.reset()
            for code, output in race.together():
                counts.runs += 1
                counts.succeeded += code == 0
                counts.hangs += code is None
                if code not in (0, None):
                    allowed = code in scenario.races
                    counts.refused += allowed
                    counts.false_refusals += not allowed
                if code not in scenario.races:
                    counts.failures.append(f"{name}: exit code {code}\n{output[-1500:]}")
            ended = race.run(scenario.act)
            after = scenario.snapshot(race.work)
            if ended.how != "ok" or after != reference:
                counts.unsound += 1
                counts.failures.append(f"{name}: after the race\n{ended.output}{differences(reference, after)}")
    counts.seconds = round(time.monotonic() - begun, 1)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=sorted(RACED))
    parser.add_argument("--rounds", type=int, default=1 << 30, help="for a scenario of cost 1; others get fewer")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each scenario")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="sparkforge-robustness-")).resolve()
    try:
        if not os.environ.get(SHIM):
            return preloaded("robustness.races", base)
        rows = apart(options.scenarios, base, lambda scenario, folder: campaign(
            scenario, scaled(options.rounds, scenario), options.seconds, folder))  # fmt: skip
    finally:
        shutil.rmtree(base, ignore_errors=True)
    for row in rows:
        for failure in row["failures"][:3]:
            again = f"PYTHONPATH=tests {sys.executable} -m robustness.races {row['scenario']}"
            sys.stderr.write(f"{failure}\n    {again}\n")
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
