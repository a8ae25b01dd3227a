"""The benchmark without `./inv`, for the container: python -m sparkforge.bench acc | perf | submit TEAM.

The options are those of `./inv bench.*`. BENCH_URL and BENCH_MODEL replace --url and --model; the gpt-oss
competition's variables work as with `./inv`.
"""

import os
import sys
from collections.abc import Sequence

from sparkforge.bench import runs, submit
from sparkforge.bench.options import COMMANDS, OPTIONS
from sparkforge.core.program import ArgumentParser, exit_code

NAMES = {"acc": "accuracy", "perf": "load", "submit": "submit"}
VARIABLES = {"url": "BENCH_URL", "model": "BENCH_MODEL"}


def parser() -> ArgumentParser:
    """Return the parser of all commands; long options may have one dash, as in the gpt-oss competition."""
    top = ArgumentParser(prog="python -m sparkforge.bench", description=__doc__, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, row in NAMES.items():
        options = commands.add_parser(command, allow_abbrev=False)
        if command == "submit":
            options.add_argument("team")
        for name in COMMANDS[row]:
            option, word = OPTIONS[name], name.replace("_", "-")
            if option.flag:
                options.add_argument(f"--{word}", f"-{word}", dest=name, action="store_true", help=option.help_text)
            else:
                default = os.environ.get(VARIABLES.get(name, ""), "")
                options.add_argument(f"--{word}", f"-{word}", dest=name, default=default, help=option.help_text)
    return top


def main(command_line: Sequence[str]) -> int:
    """Run one command, by default `perf`, and return its exit code."""
    if not command_line or (command_line[0].startswith("-") and command_line[0] not in ("-h", "--help")):
        command_line = ["perf", *command_line]

    def run() -> None:
        flags = vars(parser().parse_args(command_line))
        match flags.pop("command"):
            case "acc":
                runs.run_gate(flags)
            case "perf":
                runs.run_benchmark(flags)
            case _:
                submit.main(flags)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
