"""Attacks that Sparkforge withstands, kept as tests: failing disks, kills at every step, races, and malformed input.

    shim.c       preloaded into Python: makes the N-th disk operation below a folder fail, or kills the process there
    scenario.py  defines a scenario: inputs, a command, and invariants that hold after any fault
    scenarios/   one scenario for each command that writes to the disk, small enough to run thousands of times
    faults.py    runs one scenario: counts its operations, breaks each of them, and lets the next run recover
    races.py     runs the same scenario in several processes at once
    parsers.py   every parser with samples and the call that reads them
    fuzz.py      mutates samples; only declared errors may come out, in 5 s and 4 GB
    hostile.py   hostile requests against a live server, while a bystander measures its own waiting times
    hostile_texts.py  random texts, schemas and grammars for hostile.py
    campaign.py  all of these for some minutes, with counts as JSON: `./inv test --robustness [--minutes N]`

The tests here (`test_*.py`) are the short run: the same programs with fixed seeds and small counts. Each failure is
printed with the command that repeats it.
"""
