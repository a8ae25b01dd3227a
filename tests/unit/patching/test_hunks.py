"""Our applier compared with `git apply` as an independent oracle, on diffs of texts by hypothesis."""

import tempfile
from pathlib import Path

import pytest
from expected import refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkforge.core.errors import PatchError
from sparkforge.patching.hunks import parse

pytestmark = pytest.mark.needs("git")

# Few different lines, so that hunks fit in several places; some lines would break a careless splitter.
LINE = st.sampled_from(["", "a", "b", "c", " a", "-x", "--- a/f", "+++ b/f", "@@ -1 +1 @@", "\\ No newline", "a\rb",
                        "\x0c", "\x85é", "\u2028"])  # fmt: skip
TEXT = st.tuples(st.lists(LINE, max_size=14), st.booleans()).map(
    lambda parts: "\n".join(parts[0]) + ("\n" if parts[1] and parts[0] else "")
)
CONTENT = st.one_of(st.none(), TEXT.map(str.encode))
RELAXED = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def git_apply(kit, directory, content, diff):
    """Return git's result: (applied?, offset or fuzz needed?, bytes after)."""
    kit.write(directory, {"f": content})
    result = kit.git(directory, "apply", "-p1", "-v", "-", stdin=diff)
    file = directory / "f"
    return result.returncode == 0, b"offset" in result.stderr, file.read_bytes() if file.exists() else None


@pytest.mark.slow
@RELAXED
@given(before=CONTENT, after=CONTENT)
def test_diffs_by_git_are_read_and_applied_as_by_git(kit, before, after):
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        diff = kit.diff(scratch / "diff", {"f": before, "other": "x"}, {"f": after, "other": "x"})
        if before == after:
            assert diff == b""
            return
        (change,) = parse("0001-x.patch", diff.decode())
        assert change.apply(before) == after
        assert git_apply(kit, scratch / "tree", before, diff) == (True, False, after)


@pytest.mark.slow
@RELAXED
@given(before=TEXT, after=TEXT, above=TEXT, below=TEXT, keep=st.booleans())
def test_on_another_text_we_are_exactly_as_strict_as_git_without_offsets(kit, before, after, above, below, keep):
    if before == after:
        return
    other = above + before * keep + below
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        diff = kit.diff(scratch / "diff", {"f": before}, {"f": after})
        (change,) = parse("0001-x.patch", diff.decode())
        applied, moved, result = git_apply(kit, scratch / "tree", other.encode(), diff)
        try:
            ours = change.apply(other.encode())
        except PatchError:
            # git treats a last line with and without a newline alike; we distinguish them.
            assert not applied or moved or b"\n\\ No newline" in diff
        else:
            assert (applied, moved, result) == (True, False, ours)


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_patch_cut_by_its_last_byte_is_refused_as_git_refuses_it(kit, tmp_path, ending):
    before = "a\nb\nc" + ending
    diff = kit.diff(tmp_path / "diff", {"f": before}, {"f": before.replace("a", "A")})
    assert git_apply(kit, tmp_path / "whole", before, diff)[0]
    if ending:
        assert not git_apply(kit, tmp_path / "cut", before, diff[:-1])[0]
    with refused("patch.format", "is cut off"):
        parse("0001-x.patch", diff[:-1].decode())


def test_a_hunk_without_context_is_refused_as_git_refuses_it(kit, tmp_path):
    before = "".join(f"{number}\n" for number in range(9))
    kit.write(tmp_path, {"a/f": before, "b/f": before.replace("4\n", "four\n")})
    diff = kit.git(tmp_path, "diff", "--no-index", "--no-prefix", "-U0", "a", "b").stdout
    (change,) = parse("0001-x.patch", diff.decode())
    assert not git_apply(kit, tmp_path / "tree", before, diff)[0]
    with refused("patch.conflict", "without context"):
        change.apply(before.encode())
