"""Where a moved hunk fits, against `git apply`, on texts that hypothesis makes up; and that undoing undoes."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.patches.fit import fit, undone
from sparkforge.patching.hunks import parse

LINE = st.sampled_from(["a", "b", "c", "d", "e", "", "\x0c"])
TEXT = st.tuples(st.lists(LINE, max_size=16), st.booleans()).map(
    lambda parts: "\n".join(parts[0]) + ("\n" if parts[1] and parts[0] else "")
)
RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@RELAXED
@given(before=TEXT, after=TEXT, above=TEXT, below=TEXT)
def test_what_fits_git_applies_to_the_same_bytes(kit, before, after, above, below):
    if before == after:
        return
    other = (above + before + below).encode()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        diff = kit.diff(scratch / "diff", {"f": before}, {"f": after})
        (change,) = parse("0001-x.patch", diff.decode())
        fitted = fit(change, other)
        kit.write(scratch / "tree", {"f": other})
        result = kit.git(scratch / "tree", "apply", "-p1", "-v", "-", stdin=diff)
        if not fitted.misfits:
            assert (result.returncode, (scratch / "tree/f").read_bytes()) == (0, fitted.content)
            assert any(fitted.offsets) == (b"offset" in result.stderr)
        # Else git put it into the nearest of several places, and we do not guess. Where the old text has no newline at
        # its end git also takes it for the beginning of a longer line; `hunks` refuses that, too.
        elif result.returncode == 0 and before.endswith("\n"):
            assert any("places" in misfit.why or "earlier hunk" in misfit.why for misfit in fitted.misfits)


@pytest.mark.slow
@RELAXED
@given(before=TEXT, after=TEXT)
def test_where_it_applies_strictly_it_fits_the_same_and_its_reverse_takes_it_back(kit, before, after):
    if before == after:
        return
    with tempfile.TemporaryDirectory() as name:
        (change,) = parse("0001-x.patch", kit.diff(Path(name), {"f": before}, {"f": after}).decode())
    assert fit(change, before.encode()).content == change.apply(before.encode()) == after.encode()
    assert undone(change).apply(after.encode()) == before.encode()
    assert undone(undone(change)) == change
