"""The table of kernels is well-formed, and fits the audit's rules and the table of peaks."""

import pytest

from sparkforge.compile.flashinfer.sets import TABLE as PATH
from sparkforge.compile.flashinfer.sets import load
from sparkforge.core.errors import InputError, UsageError

VERSION = "0.7.0.post1"
TABLE = load(VERSION)


def changed(tmp_path, old, new):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
    assert old in PATH.read_text()
    path.write_text(PATH.read_text().replace(old, new, 1))
    return load(VERSION, path)


def test_the_digest_depends_only_on_the_built_modules(tmp_path):
    digest = TABLE.digest(TABLE.module)
    other = changed(tmp_path, "page_size = 16", "page_size = 32")
    changed_why = changed(tmp_path, 'why = "', 'why = "perhaps ')
    assert other.digest(other.module) != digest
    assert changed_why.digest(changed_why.module) == digest
    assert TABLE.digest(TABLE.chosen("trial")) != digest


def test_an_inconsistent_table_is_refused(tmp_path):
    for old, new in (
        ('call = "experts"', 'call = "nothing"'), ('name = "sampling"', 'name = "fp4_quantization_120f"'),
        ('generator = "flashinfer.jit.sampling:gen_sampling_module"', 'generator = "os:system"'),
        ("schema = 1", "schema = 2"), ("lines = [365, 365]", "lines = []"),
    ):  # fmt: skip
        with pytest.raises((ValueError, LookupError)):
            changed(tmp_path, old, new)


def test_an_unknown_release_or_set_is_named():
    with pytest.raises(InputError, match=f"no kernels are known for FlashInfer 0.5.3.*{VERSION}"):
        load("0.5.3")
    with pytest.raises(UsageError, match="gpt-oss"):
        TABLE.chosen("llama")
