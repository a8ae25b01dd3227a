"""MXFP4 experts for MAX: the format, the kernels and the graph operations."""

from .ops import *
