"""What a new upstream release does to a stack. In: pins, patch queues, kernel sets, profiles and a release's archive.

Out: a report with one row for each release (`./inv upstream.check`), and newer pins as a diff (`./inv pins.update`).
"""
