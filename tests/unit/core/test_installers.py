"""What pip and uv print when they refuse; the texts are theirs, of pip 26 and uv 0.9."""

import pytest

from sparkforge.core import installers

OFFERED = "ERROR: Could not find a version that satisfies the requirement demo==1.0 (from versions: {})\n"
TIMEOUT = (
    "error: Failed to fetch: `https://x/demo/`\n  Caused by: error sending request\n  Caused by: operation timed out\n"
)
UNREACHABLE = """\
error: Failed to fetch: `https://proxy.example.org/timeout/demo/`
  Caused by: Connection refused (os error 111)
"""
CONFLICT = """\
Looking in indexes: https://x/simple
ERROR: Cannot install torch==2.13.0+cpu because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested torch==2.13.0+cpu
    The user requested (constraint) torch<=2.12

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/
"""
CASES = {
    "a constraint": (CONFLICT, "is needed, and a constraint of pip's settings demands torch<=2.12"),
    "another Python": (OFFERED.format("0.8, 0.9"), "no demo==1.0 for this Python and machine, only 0.8, 0.9"),
    "busy": ("error: Failed to fetch: http://x/\n  cause: HTTP status server error (503 Service", "busy (503 S"),
    "silence": (TIMEOUT, "stopped answering"),
    "refused": (UNREACHABLE, "nothing answers"),
    "no name": ("dns error: failed to lookup address information: Name or service", "cannot be resolved"),
    "credentials": ("hint: An index URL (http://x) could not be queried (401 Unauthorized)", "refuses the credentials"),
    "hash, uv": ("error: Failed to download `demo==1.0`\n  cause: Hash mismatch for `demo==1.0`\n", "demo==1.0 with"),
    "hash, pip": ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM\n    demo==1.0 from http://x", "demo==1.0 with"),
    "missing": ("Because demo was not found in the package registry and you\n    require demo==1.0", "has no demo"),
    "full disk": ("ERROR: Could not install due to an OSError: [Errno 28] No space left on device", "no space"),
    "certificate": ("Caused by: invalid peer certificate: UnknownIssuer", "certificate is not trusted"),
    "a proxy": ("  Caused by: client error (Connect)\n  Caused by: tunnel error: unsuccessful", "proxy refuses"),
    # Words of a mirror's address and of packages are no causes.
    "a mirror called proxy": (f"Looking in: https://proxy.example.org/\nhttp-proxy\n{UNREACHABLE}", "nothing answers"),
    "a package called timeout": ("Collecting async-timeout==9\n" + OFFERED.format("4.0"), "no demo==1.0 for this"),
    "unknown": ("Collecting demo\nERROR: something new happened\nWARNING: a newer pip\n", "something new happened"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_is_one_line_with_its_cause(case, monkeypatch):
    monkeypatch.setenv("PIP_CONSTRAINT", "limits.txt")
    output, cause = CASES[case]
    refusal = installers.refusal(output)
    assert cause in refusal.cause
    assert "\n" not in refusal.cause
    assert refusal.busy is (case in {"busy", "silence", "no name"})
    assert refusal.fix
    assert ("PIP_CONSTRAINT=limits.txt" in refusal.cause) == (case == "a constraint")


@pytest.mark.parametrize(("failures", "attempts"), [(1, 2), (9, 3)])
def test_a_busy_index_is_asked_again(monkeypatch, failures, attempts):
    monkeypatch.setattr(installers, "RETRY_SECONDS", (0.01, 0.01))
    outputs = [CASES["busy"][0]] * failures + [""] * 3
    lines, asked = [], []
    refused = installers.insist(lambda: asked.append(1) or outputs.pop(0), lines.append, "the wheel")
    assert (len(asked), refused is None) == (attempts, failures < 3)
    assert len(lines) == attempts - 1
