"""What a new upstream release does to a stack. In: pins, patch queues, kernel sets, profiles and a release's archive.

Out: a report with one row for each release, and newer pins as a diff: `python -m lab.upstream check | update`.
"""
