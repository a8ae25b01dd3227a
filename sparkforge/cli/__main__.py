"""`python -m sparkforge.cli`, which `./inv` runs."""

import sys

from sparkforge.cli.program import main

sys.exit(main(sys.argv[1:]))
