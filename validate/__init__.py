"""Startup gate: facts → checks → report → exit code."""
