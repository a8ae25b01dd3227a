"""RECORD as a program reads it: whatever is in it, lines come out or a named refusal."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.core.errors import IntegrityError
from sparkforge.core.installed import Installed, parse_record, record_digest

HASH = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
NAMES = ["pkg/a.py", "../../../bin/x", "../../../etc/passwd", "p-1.dist-info/RECORD", "/", "", "..", "a,b"]
PATHS, HASHES = st.sampled_from(NAMES) | st.text(), st.sampled_from([HASH, "", "md5=x"]) | st.text()
LINES = st.lists(st.tuples(PATHS, HASHES, st.text()), max_size=6)


@given(st.text() | LINES.map(lambda lines: "\n".join(",".join(line) for line in lines)), st.booleans())
def test_any_text_is_lines_or_a_named_refusal(text, strict):
    lines = ()
    with suppress(IntegrityError):
        lines = parse_record(text, "RECORD", strict=strict)
    assert all(not line.path.startswith(("/", "../")) and len(line.sha256) == 64 for line in lines)
    assert record_digest(reversed(lines)) == record_digest(lines)


def test_the_digest_is_over_unquoted_lines_in_order():
    """The digest of locks/patched.toml, by its definition."""
    text = f'"b/E=8,N=7.json",{HASH},0\na.py,{HASH},0\np-1.dist-info/RECORD,,\np-1.dist-info/INSTALLER,{HASH},0\n'
    digest = record_digest(parse_record(text, "RECORD"))
    assert digest == "f62044b9c256a78beb2106507603cd5998667578f4ce06b3f58785ab7d972256"


def test_without_strictness_only_lines_that_cannot_be_compared_are_left_out(tmp_path):
    info = tmp_path / "p-1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"a.py,{HASH},0\nb.py,,\n../../../share/man/p.1,{HASH},0\n")
    (tmp_path / "a.py").write_text("")
    with pytest.raises(IntegrityError, match="not a sha256"):
        Installed.read(info)
    installed = Installed.read(info, strict=False)
    assert [line.path for line in installed.lines] == ["a.py"]
    assert installed.differences(added=None) == []
