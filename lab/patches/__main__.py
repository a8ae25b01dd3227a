"""python -m lab.patches into | new | lock | status | rebase: work with patch queues."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.patches import authoring, checkout, lock, rebase, status
from sparkforge import pins
from sparkforge.cli.build import chosen_stack
from sparkforge.core.console import say
from sparkforge.core.program import exit_code


def main() -> None:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.patches", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="write a patch from a checkout, or make a scratch copy to edit")
    new.add_argument("name", help="the patch's name for its file name, such as fix-routing")
    new.add_argument("--stack", default="", help="stack of pins.toml; default: its default")
    new.add_argument("--upstream", default="vllm", help="such as vllm (the default) or flashinfer")
    new.add_argument("--from", dest="source", default="", help="a checkout with the queue (lab.patches into): "
                     "everything in it beyond the queue is the patch")  # fmt: skip
    new.add_argument("--commit", default="", help="with --from: only this commit; its message is the description")
    new.add_argument("--finish", action="store_true", help="write the patch from the scratch copy")
    new.add_argument("--description", default="", help="what the patch does and why")
    new.add_argument("--bug", default="", help="URL of the report")
    new.add_argument("--drop-when", default="", help="when to drop the patch: contains PATH TEXT, or lacks PATH TEXT")
    into = commands.add_parser("into", help="put a queue as commits into a clone at the pinned version")
    into.add_argument("tree", type=Path, help="the clone of vLLM or FlashInfer")
    write = commands.add_parser("lock", help="write the hashes of a stack's patched files to locks/patched.toml")
    judge = commands.add_parser("status", help="print whether each patch applies to a release")
    judge.add_argument("--against", default="", help="0.33.0 is vLLM's, else flashinfer-0.7.2.post1; default: pinned")
    judge.add_argument("--tree", default="", help="a folder with unpatched sources, in place of the pinned archives")
    for command in (into, write, judge):
        command.add_argument("--stack", default="", help="stack of pins.toml; default: its default")
    carry = commands.add_parser("rebase", help="carry a queue over to another release, into a new folder")
    carry.add_argument("to", help="the version: 0.33.0 is vLLM's, else flashinfer-0.7.2.post1")
    carry.add_argument("--stack", default="", help="stack of pins.toml; default: its default")
    carry.add_argument("--drop", default="", help="numbers of patches to leave out, comma-separated")
    carry.add_argument("--continue", dest="resume", action="store_true", help="continue after resolving the conflicts")
    arguments = parser.parse_args()
    stack = chosen_stack(arguments.stack)
    match arguments.command:
        case "into":
            say(checkout.commit_to_checkout(pins.load(), stack, arguments.tree))
        case "lock":
            lock.lock_stack(stack)
        case "status":
            status.print_status(stack, arguments.against, arguments.tree)
        case "rebase":
            rebase.rebase_queue(arguments.to, stack, arguments.drop, resume=arguments.resume)
        case "new":
            header = {name: getattr(arguments, name) for name in ("description", "bug", "drop_when")}
            fields = {name: text for name, text in header.items() if text}
            order = authoring.PatchOrder(
                arguments.name, fields, stack, arguments.upstream, arguments.source, arguments.commit, arguments.finish
            )
            authoring.new_patch(order)


if __name__ == "__main__":
    sys.exit(exit_code(main))
