"""Assertions about errors."""

import pytest

from sparkforge.core.errors import SparkforgeError


def refused(code, match=None):
    """Expect an error of ours with this code, whose three parts match."""
    return pytest.raises(SparkforgeError, match=match, check=lambda error: error.code == code)
