"""Kernels measured on a GPU: alone, and inside a server."""
