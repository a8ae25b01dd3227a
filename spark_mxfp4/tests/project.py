"""Paths of files outside the package that tests use."""

from pathlib import Path

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "src" / "spark_mxfp4"
