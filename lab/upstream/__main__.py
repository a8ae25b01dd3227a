"""python -m lab.upstream check | update: check a stack against new upstream releases, or propose newer pins."""

from __future__ import annotations

import argparse
import sys

from lab.upstream import check, update
from sparkforge.cli.build import chosen_stack
from sparkforge.core.program import exit_code


def main() -> None:
    """Run `check` or `update`. `check` exits with 1 if a release breaks something, or if that cannot be determined."""
    parser = argparse.ArgumentParser(prog="python -m lab.upstream", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options = commands.add_parser("check", help="check whether a stack can move to new releases")
    options.add_argument("--stack", default="", help="stack; default: the default stack of pins.toml")
    options.add_argument("--against", default="", help="comma-separated releases, such as 0.33.0; default: the newest")
    options.add_argument("--python", default="", help="interpreter with torch; default: the embedded device's")
    options.add_argument("--static", action="store_true", help="run no code of a release")
    options.add_argument("--json", action="store_true", help="print the report as JSON")
    options = commands.add_parser("update", help="propose newer versions as a diff of pins.toml; changes nothing")
    options.add_argument("--stack", default="", help="one stack only")
    arguments = parser.parse_args()
    if arguments.command == "update":
        update.print_updates(arguments.stack)
        return
    releases = [name for name in arguments.against.split(",") if name]
    stack, static = chosen_stack(arguments.stack), arguments.static
    if not check.check_stack(stack, releases, python=arguments.python, static=static, as_json=arguments.json):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(exit_code(main))
