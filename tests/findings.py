"""Which findings of a validation are a fault of ours, and not a lack of the machine that runs the tests."""

from validate.checks import hardware


def faults(findings):
    """Return those that did not pass, but for warnings about the machine: an old processor, a small /dev/shm."""
    of_the_machine = {check.name for check in hardware.CHECKS}
    return [
        finding
        for finding in findings
        if finding["status"] != "pass" and not (finding["status"] == "warn" and finding["check"] in of_the_machine)
    ]
