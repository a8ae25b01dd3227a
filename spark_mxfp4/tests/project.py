"""Where the tests find what is not part of the package."""

from pathlib import Path

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "src" / "spark_mxfp4"
