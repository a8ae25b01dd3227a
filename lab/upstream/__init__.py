"""Checks how a new upstream release affects a stack, from pins, patch queues, kernel sets, profiles and the archive.

The output is a report with one row for each release, or newer pins as a diff: `python -m lab.upstream check | update`.
"""
