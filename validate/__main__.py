"""`python -m validate --profile spark`: exit code 0 means the server may start; every other code means it must not."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from sparkforge.console import show_error
from sparkforge.errors import SparkforgeError, UsageError
from sparkforge.files import write_json
from validate import Options, Report, rehearse, run
from validate.facts import load_sheet
from validate.profiles import PROFILES
from validate.report import as_document, exit_code, lines, one_line


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and exiting."""
        raise UsageError("validate cannot read its arguments", message, "python -m validate --help")


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(prog="python -m validate", description=__doc__, allow_abbrev=False)
    made.add_argument("--profile", required=True, help=f"one of {', '.join(PROFILES)}")
    made.add_argument("--facts", type=Path, metavar="FILE.json", help="rehearse on a recorded sheet")
    made.add_argument("--json", type=Path, metavar="OUT", help="write the report there too")
    made.add_argument("--model", type=Path, metavar="DIR", help="the model directory")
    made.add_argument("--host", help="the address the server will listen on")
    made.add_argument("--port", type=int, metavar="N", help="the port the server will take")
    made.add_argument("--gpu-memory-utilization", type=float, metavar="X", help="the share vLLM will be told to take")
    made.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter that will serve")
    made.add_argument("--deep", action=argparse.BooleanOptionalAction, default=True, help="ask torch and vllm as well")
    made.add_argument("--deep-seconds", type=float, default=Options.deep_seconds, help="and wait that long for them")
    made.add_argument(
        "--numerics-seconds", type=float, default=Options.numerics_seconds, help="and that long to compute"
    )
    made.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="all that follows goes to the server")
    return made


def validate(told: argparse.Namespace) -> Report:
    """Run or rehearse, as the arguments say."""
    if told.facts is not None:
        sheet = load_sheet(told.facts)
        return rehearse(told.profile, sheet, one_line(f"recorded sheet {told.facts}{_origin(told.facts)}"))
    return run(
        told.profile,
        Options(
            model=told.model,
            host=told.host,
            port=told.port,
            gpu_memory_utilization=told.gpu_memory_utilization,
            serve_args=tuple(told.serve_args),
            python=told.python,
            deep=told.deep,
            deep_seconds=told.deep_seconds,
            numerics_seconds=told.numerics_seconds,
        ),
    )


def main(words: list[str] | None = None) -> int:
    """Validate, print, write; return the exit code."""
    try:
        told = parser().parse_args(words)
        report = validate(told)
        for line in lines(report):
            print(line, flush=True)
        if told.json is not None:
            _write(told.json, as_document(report))
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return exit_code(report)


def _origin(path: Path) -> str:
    told: Any = json.loads(path.read_text(encoding="utf-8")).get("origin")
    return f" ({told})" if isinstance(told, str) else ""


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        write_json(path, document)
    except OSError as error:
        raise UsageError(f"cannot write the report to {path}", str(error.strerror), "name a writable file") from error


if __name__ == "__main__":
    sys.exit(main())
