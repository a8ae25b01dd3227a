"""`python -m spark_mxfp4.template NAME [--folder DIR]`."""

import argparse
import sys
from pathlib import Path

from spark_mxfp4 import template


def main(arguments: list[str]) -> int:
    """Write a kernel and print the next commands; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spark_mxfp4.template", description=template.__doc__)
    parser.add_argument("name", help="the module's name, such as fast_moe")
    parser.add_argument("--folder", type=Path, default=Path(), help="parent of the new folder; default: here")
    options = parser.parse_args(arguments)
    try:
        folder = template.write(options.name, options.folder.absolute())
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(template.next_steps(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
