"""Untrusted files, RECORD included: the reader returns a value or raises a declared error."""

import json
import os
from contextlib import suppress

import pytest
from expected import refused
from hypothesis import given
from hypothesis import strategies as st
from programs import write_files

from sparkforge.core import files
from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import DocumentError, parse_json, read_json, read_text, read_toml
from sparkforge.core.installed import Installed, parse_record, record_digest

pytestmark = pytest.mark.timeout(60)
BAD_JSON = {
    "empty": b"", "bytes": b"\xff\xfe\xff", "NUL": b'{"a": "\0"}', "deep": b"[" * 200_000,
    "closed and deep": b"[" * 100 + b"]" * 100, "NaN": b'{"a": NaN}', "infinite": b'{"a": [1e999]}',
    "digits": b'{"a": ' + b"9" * 5000 + b"}", "huge": b'{"a": 1180591620717411303424}', "cut": b'{"a": "b',
}  # fmt: skip
BAD_TOML = {
    "bytes": b"\xff\xfe", "deep": b"a = " + b"[" * 20_000 + b"]" * 20_000, "deep table": b"a" + b".a" * 200 + b" = 1",
    "deeper table": b"a" + b".a" * 2_000_000 + b" = 1", "NaN": b"a = nan", "cut": b"a = 'b",
}  # fmt: skip


@pytest.mark.parametrize(
    ("read", "data"),
    [*((read_json, data) for data in BAD_JSON.values()), *((read_toml, data) for data in BAD_TOML.values())],
    ids=[*BAD_JSON, *BAD_TOML],
)
def test_a_malformed_document_is_a_declared_error_that_names_the_file(tmp_path, read, data):
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(DocumentError, match=r"it is|it holds" if read is read_toml else None) as caught:
        read(path)
    assert caught.value.what == f"cannot read {path}"
    assert str(caught.value) == caught.value.why
    assert "\n" not in caught.value.why


def test_well_formed_documents_are_read(tmp_path):
    path = tmp_path / "x"
    value = {"a": [1, 2.5, None, "ü\ud800"], "large": 2**64 - 1, "b": json.loads("[" * 60 + "]" * 60)}
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read_json(path) == value
    assert parse_json('"x"', "an answer") == "x"
    assert parse_json("[1e999]", "a program", finite=False) == [float("inf")]
    path.write_bytes(b"\xef\xbb\xbfa = 1\r\n[b]\r\nc = 'd'\r\n")
    assert read_toml(path) == {"a": 1, "b": {"c": "d"}}
    assert read_text(path).startswith("a = 1")


def test_size_has_a_limit_and_so_has_the_number_of_values(tmp_path):
    """0.5 MB of gzip expand to 480 MB of `{},`, and Python takes 64 bytes for each value."""
    path = tmp_path / "x"
    path.write_bytes(b'"' + b"x" * 100 + b'"')
    for read in (read_json, read_text):
        with pytest.raises(DocumentError, match="more than 50 bytes"):
            read(path, largest=50)
    path.write_bytes(b"#" * (files.LARGEST_TOML + 1))
    with pytest.raises(DocumentError, match="more than 4,194,304 bytes"):
        read_toml(path)
    assert parse_json("[" + "0," * 9_999_990 + "0]", "x")
    with pytest.raises(DocumentError, match="more than 10,000,000 values"):
        parse_json("[" + "{}," * 5_000_000 + "0]", "x")


def test_special_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", files.Path("/dev/zero")):
        with pytest.raises(DocumentError, match="pipe, socket or device"):
            read_json(path)
    with pytest.raises(IsADirectoryError) as caught:
        read_json(tmp_path)
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        read_json(tmp_path / "none")
    assert str(caught.value.filename) == str(tmp_path / "none")
    with refused("storage.access", "null"):
        read_json(files.Path("a\0b"))


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
    """Compare with the definition of the digest in locks/patched.toml."""
    text = f'"b/E=8,N=7.json",{HASH},0\na.py,{HASH},0\np-1.dist-info/RECORD,,\np-1.dist-info/INSTALLER,{HASH},0\n'
    digest = record_digest(parse_record(text, "RECORD"))
    assert digest == "f62044b9c256a78beb2106507603cd5998667578f4ce06b3f58785ab7d972256"


def test_without_strictness_only_lines_that_cannot_be_compared_are_left_out(tmp_path):
    info = tmp_path / "p-1.dist-info"
    write_files(info, {"RECORD": f"a.py,{HASH},0\nb.py,,\n../../../share/man/p.1,{HASH},0\n", "../a.py": ""})
    with pytest.raises(IntegrityError, match="not a sha256"):
        Installed.read(info)
    installed = Installed.read(info, strict=False)
    assert [line.path for line in installed.lines] == ["a.py"]
    assert installed.differences(added=None) == []
