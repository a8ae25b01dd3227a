"""Serve profiles are data, read strictly."""

import pytest

from serve import profiles
from sparkforge.errors import StorageError, UsageError

GOOD = """
[profiles.safe]
about = "a"
[[profiles.safe.flags]]
flag = "--max-num-seqs"
value = 16
why = "w"
[[profiles.safe.flags]]
flag = "--enforce-eager"
why = "w"
[[profiles.safe.environment]]
name = "X"
value = "1"
why = "w"
"""


@pytest.fixture
def table(tmp_path):
    def table(text):
        (tmp_path / "profiles.toml").write_text(text)
        return tmp_path / "profiles.toml"

    return table


def test_flags_and_variables_come_from_the_table(table):
    safe = profiles.named("safe", table(GOOD))
    assert safe.words() == ("--max-num-seqs=16", "--enforce-eager")
    assert safe.variables() == {"X": "1"}


def test_an_unknown_name_is_refused_with_the_known_ones(table):
    with pytest.raises(UsageError, match="there are safe"):
        profiles.named("fast", table(GOOD))


@pytest.mark.parametrize(
    "wrong",
    [
        "profiles = 3",
        "[other]",
        "[profiles.safe]",  # no `about`
        GOOD.replace("about", "abuot"),
        GOOD.replace('why = "w"', "", 1),
        GOOD.replace("--max-num-seqs", "max-num-seqs"),
        GOOD.replace("--max-num-seqs", "--max-num-seqs=3"),
        GOOD.replace("value = 16", "value = [16]"),
        GOOD.replace("value = 16", "value = true"),
        GOOD + "[profiles.safe",
    ],
)
def test_a_malformed_table_is_a_named_error(table, wrong):
    with pytest.raises(UsageError, match="malformed"):
        profiles.load(table(wrong))


def test_a_table_that_is_gone_is_a_named_error(tmp_path):
    with pytest.raises(StorageError):
        profiles.load(tmp_path / "none.toml")


def test_every_flag_of_this_checkout_has_its_reason():
    found = profiles.load()
    assert "embedded" in found
    for profile in found.values():
        assert profile.about
        assert all(setting.why.strip() for setting in (*profile.flags, *profile.environment))
