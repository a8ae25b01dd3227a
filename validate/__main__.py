"""`python -m validate --profile spark`: exit code 0 means the server may start; every other code means it must not."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from sparkforge.core import program
from sparkforge.core.console import echo
from sparkforge.core.errors import UsageError
from sparkforge.core.files import read_json, write_json
from sparkforge.core.program import ArgumentParser
from validate import Options, ValidationReport, rehearse, run
from validate.facts.fact import load_sheet
from validate.gate import as_document, exit_code, lines, one_line
from validate.profiles import PROFILES


def make_parser() -> ArgumentParser:
    """Return the parser of the command's arguments; it raises UsageError."""
    parser = ArgumentParser(prog="python -m validate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--profile", required=True, help=f"one of {', '.join(PROFILES)}")
    parser.add_argument("--stack", help="the stack of pins.toml that is installed (default: the profile's)")
    foreign, asks = "the environment is your own: other versions are warnings", "query torch and vllm in a child"
    parser.add_argument("--foreign", action="store_true", help=foreign)
    parser.add_argument("--facts", type=Path, metavar="FILE.json", help="judge the facts of a recorded sheet")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the report to this file")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model directory")
    parser.add_argument("--host", help="the address the server will listen on")
    parser.add_argument("--port", type=int, metavar="N", help="the port the server will listen on")
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="X", help="the share of memory for vLLM")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter that will serve")
    parser.add_argument("--deep", action=argparse.BooleanOptionalAction, default=True, help=asks)
    parser.add_argument("--layers", action="store_true", help="also run the check `layers` on a CPU")
    parser.add_argument("--deep-seconds", type=float, default=Options.deep_seconds, help="time limit for --deep")
    limit, passed = "time limit for the numerics", "arguments after it are passed to the server"
    parser.add_argument("--numerics-seconds", type=float, default=Options.numerics_seconds, help=limit)
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help=passed)
    return parser


def validate(arguments: argparse.Namespace) -> ValidationReport:
    """Validate this machine, or judge a recorded sheet. Raises UsageError and InputError."""
    if arguments.facts is not None:
        sheet, origin = load_sheet(arguments.facts), read_json(arguments.facts).get("origin")
        name = f"recorded sheet {arguments.facts}" + (f" ({origin})" if isinstance(origin, str) else "")
        return rehearse(arguments.profile, sheet, one_line(name))
    named = {field.name for field in fields(Options)}
    options = {name: value for name, value in vars(arguments).items() if name in named}
    return run(arguments.profile, Options(**options))


def main(argv: list[str] | None = None) -> int:
    """Validate, print the report, write it as JSON if --json is given, and return the exit code."""
    reports = list[ValidationReport]()

    def run_once() -> None:
        arguments = make_parser().parse_args(argv)
        reports.append(validate(arguments))
        for line in lines(reports[0]):
            echo(line)
        if arguments.json is not None:
            try:
                write_json(arguments.json, as_document(reports[0]))
            except OSError as error:
                failure = f"cannot write the report to {arguments.json}"
                raise UsageError(failure, str(error.strerror), "--json validation.json") from error

    return program.exit_code(run_once) or exit_code(reports[0])


if __name__ == "__main__":
    sys.exit(main())
