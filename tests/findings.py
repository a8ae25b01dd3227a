"""Tells findings of a validation that are our faults from those that the test machine causes."""

from validate.checks import hardware


def faults(findings):
    """Return the findings that did not pass, except warnings about the machine: an old processor, a small /dev/shm."""
    of_the_machine = {check.name for check in hardware.CHECKS}
    return [
        finding
        for finding in findings
        if finding["status"] != "pass" and not (finding["status"] == "warn" and finding["check"] in of_the_machine)
    ]
