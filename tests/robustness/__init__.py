"""Attacks that Sparkforge withstands, kept as tests: failing disks, kills at every step, races, and malformed input.

    shim.c       preloaded into Python: makes the N-th disk operation below a folder fail, or kills the process there
    scenario.py  what a scenario is: inputs, a command, and what must hold whatever happens to it
    scenarios/   one scenario for each thing that writes to the disk, small enough to run thousands of times
    faults.py    runs one scenario: counts its operations, breaks each of them, lets the next run heal what is left
    races.py     runs the same scenario in several processes at once
    parsers.py   every parser with samples and the call that reads them
    fuzz.py      mutates samples; only declared errors may come out, in 5 s and 4 GB
    hostile.py   requests against a live server that could harm others, beside a bystander who measures it
    hostile_texts.py  the random texts, schemas and grammars that it sends, too
    campaign.py  all of these for some minutes, with counts as JSON: `./inv test --robustness [--minutes N]`

The tests here (`test_*.py`) are the short run: the same programs with fixed seeds and small counts. Each failure is
printed with the command that repeats it.
"""
