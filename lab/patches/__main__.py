"""python -m lab.patches new | rebase: write a patch from a checkout, and carry a queue over to another release."""

from __future__ import annotations

import argparse
import sys

from lab.patches import authoring, rebase
from sparkforge.cli.build import chosen_stack
from sparkforge.core.program import exit_code


def main() -> None:
    """Run one of the two. Both keep the header, the series and every other patch as they are."""
    parser = argparse.ArgumentParser(prog="python -m lab.patches", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="write a patch from a checkout, or make a scratch copy to edit")
    new.add_argument("name", help="the patch's name, which its file will have, such as fix-routing")
    new.add_argument("--stack", default="", help="stack of pins.toml; default: its default")
    new.add_argument("--upstream", default="vllm", help="such as vllm (the default) or flashinfer")
    new.add_argument("--from", dest="source", default="", help="a checkout with the queue (./inv patch --into): "
                     "everything in it beyond the queue is the patch")  # fmt: skip
    new.add_argument("--commit", default="", help="with --from: this commit alone; its message is the description")
    new.add_argument("--finish", action="store_true", help="write the patch from the scratch copy that was made")
    new.add_argument("--description", default="", help="what it does and why")
    new.add_argument("--bug", default="", help="URL of the report")
    new.add_argument("--drop-when", default="", help="when it can go: contains PATH TEXT, or lacks PATH TEXT")
    carry = commands.add_parser("rebase", help="carry a queue over to another release, into a folder of its own")
    carry.add_argument("to", help="the version: 0.33.0 is vLLM's, else flashinfer-0.7.2.post1")
    carry.add_argument("--stack", default="", help="stack of pins.toml; default: its default")
    carry.add_argument("--drop", default="", help="numbers of patches to leave behind, with commas")
    carry.add_argument("--continue", dest="resume", action="store_true", help="go on after the conflicts are resolved")
    arguments = parser.parse_args()
    if arguments.command == "rebase":
        rebase.rebase_queue(arguments.to, chosen_stack(arguments.stack), arguments.drop, resume=arguments.resume)
        return
    header = {name: getattr(arguments, name) for name in ("description", "bug", "drop_when")}
    authoring.new_patch(
        arguments.name,
        {name: text for name, text in header.items() if text},
        stack=chosen_stack(arguments.stack),
        of=arguments.upstream,
        source=arguments.source,
        commit=arguments.commit,
        finish=arguments.finish,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
