"""Moved hunks fit where `git apply` puts them, on texts by hypothesis; and the reverse of a change undoes it."""

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
def test_git_applies_fitting_changes_to_the_same_bytes(kit, before, after, above, below):
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
        # Otherwise git chose the nearest of several places, where we refuse. If the old text has no final newline, git
        # also matches the beginning of a longer line, which `hunks` refuses.
        elif result.returncode == 0 and before.endswith("\n"):
            assert any("places" in misfit.why or "earlier hunk" in misfit.why for misfit in fitted.misfits)


@pytest.mark.slow
@RELAXED
@given(before=TEXT, after=TEXT)
def test_a_strictly_applying_change_fits_equally_and_its_reverse_undoes_it(kit, before, after):
    if before == after:
        return
    with tempfile.TemporaryDirectory() as name:
        (change,) = parse("0001-x.patch", kit.diff(Path(name), {"f": before}, {"f": after}).decode())
    assert fit(change, before.encode()).content == change.apply(before.encode()) == after.encode()
    assert undone(change).apply(after.encode()) == before.encode()
    assert undone(undone(change)) == change
