"""Run the same scenario in several processes at once: each succeeds, or ends with its documented refusal.

    PYTHONPATH=tests python -m robustness.races fetch --rounds 20

`storage.busy` is the refusal of stages whose documentation says that only one run at a time makes an artifact. In any
order, the folder is the same as after one run.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from robustness.faults import Runner, differences, end, exit_code, print_into, run_apart, scaled
from robustness.scenario import BUSY
from robustness.scenarios import SCENARIOS
from sparkforge.core.errors import StorageError

PROCESSES = 4
RACED = [scenario.name for scenario in SCENARIOS.values() if scenario.races]
WALL = 60.0
COUNTS = ("runs", "succeeded", "refused", "false_refusals", "unsound", "hangs")  # `refused`: as documented


class Race(Runner):
    """Several children at once instead of one; `busy` tells whether a child was refused because of another."""

    busy = False

    def together(self):
        """Start all children, release them together, and return the exit code (None: it hangs) and output of each."""
        read_end, gate = os.pipe()
        children = {os.fork() or self._racer(read_end, gate, number): number for number in range(PROCESSES)}
        os.close(read_end)
        os.close(gate)
        codes, deadline = {}, time.monotonic() + WALL
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

    def _act(self):
        try:
            self.scenario.act(self.work)
        except StorageError as error:
            self.busy = error.code == "storage.busy"
            raise

    def _printed(self, number):
        return self.base / f"output-{number}"

    def _racer(self, read_end, gate, number):
        print_into(self._printed(number))
        os.close(gate)
        os.read(read_end, 1)  # returns when the parent closes its end
        code = exit_code(self._act)
        end(BUSY if self.busy else code)


def campaign(scenario, rounds, seconds, base):
    counts, begun = {"scenario": scenario.name, **dict.fromkeys(COUNTS, 0), "failures": []}, time.monotonic()
    race = Race(scenario, base)
    repeat = f"PYTHONPATH=tests {sys.executable} -m robustness.races {scenario.name}"

    def fail(broken, detail):
        counts["failures"].append({"operation": "race", "broken": broken, "detail": detail[-1500:], "repeat": repeat})

    with scenario.serve(race.work):
        race.prepare()
        try:
            reference = race.reference()
        except AssertionError as error:
            counts["unsound"] += 1
            fail("it fails by itself", str(error))
            return counts
        for _ in range(rounds):
            if time.monotonic() > begun + seconds:
                break
            race.reset()
            for code, output in race.together():
                allowed = code in scenario.races
                kind = "hangs" if code is None else "refused" if allowed else "false_refusals"
                counts["succeeded" if code == 0 else kind] += 1
                counts["runs"] += 1
                if not allowed:
                    fail(f"exit code {code}", output)
            ended, after = race.run(scenario.act), scenario.snapshot(race.work)
            if ended.how != "ok" or after != reference:
                counts["unsound"] += 1
                fail("after the race it is not sound", f"{ended.output}{differences(reference, after)}")
    counts["seconds"] = round(time.monotonic() - begun, 1)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=sorted(RACED))
    parser.add_argument("--rounds", type=int, default=1 << 30, help="for a scenario of cost 1; others get fewer")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each scenario")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    return run_apart("robustness.races", options, lambda scenario, folder: campaign(
        scenario, scaled(options.rounds, scenario), options.seconds, folder))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
