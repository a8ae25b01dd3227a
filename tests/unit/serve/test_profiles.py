"""Serve profiles are data, read strictly; a profile includes what it inherits."""

import pytest
from expected import refused

from sparkforge import pins
from sparkforge.core.errors import UsageError
from sparkforge.patching import series
from sparkforge.serve import profiles

GOOD = """
[bases.common.flags]
"--shutdown-timeout" = {value = 45, why = "w"}
"--max-num-seqs" = {value = 8, why = "w"}

[profiles.safe]
about = "a"
extends = "common"
[profiles.safe.flags]
"--max-num-seqs" = {value = 16, why = "w"}
"--enforce-eager" = {why = "w"}
[profiles.safe.environment]
X = {value = "1", why = "w"}

[profiles.fast]
about = "b"
extends = "safe"
[profiles.fast.environment]
X = {value = "2", why = "w"}
"""
NEXT = """
[stacks.next.profiles.safe.flags]
"--max-num-seqs" = {value = 32, why = "w"}
[stacks.next.profiles.trial]
about = "c"
extends = "fast"
"""


@pytest.fixture
def table(tmp_path):
    return lambda text: (tmp_path / "profiles.toml").write_text(text) and tmp_path / "profiles.toml"


@pytest.mark.parametrize("name", ["quick", "common"])
def test_an_unknown_name_is_refused_with_the_known_ones_and_a_base_is_none(table, name):
    with pytest.raises(UsageError, match="choose from safe, fast"):
        profiles.named(name, table(GOOD))


@pytest.mark.parametrize(
    "wrong",
    [
        "profiles = 3",
        GOOD.replace("about", "abuot"),
        GOOD.replace(', why = "w"', "", 1),
        GOOD.replace('"--max-num-seqs"', "max-num-seqs"),
        GOOD.replace('"--max-num-seqs"', '"--max-num-seqs=3"'),
        GOOD.replace("value = 16", "value = true"),
        GOOD.replace('extends = "common"', 'extends = "nothing"'),
        GOOD.replace('extends = "common"', 'extends = "fast"'),  # a circle
        GOOD + "[profiles.safe",
        GOOD + NEXT.replace('extends = "fast"', 'extends = "slow"'),
        GOOD + NEXT.replace('about = "c"', ""),
    ],
)
def test_a_malformed_table_is_a_named_error(table, wrong):
    with refused("input.table", r"malformed|no TOML"):
        profiles.load(table(wrong))


def test_a_stack_changes_a_profile_and_what_extends_it_and_adds_its_own(table):
    path = table(GOOD + NEXT)
    assert list(profiles.load(path)) == ["safe", "fast"]
    assert profiles.load(path) == profiles.load(path, stack="other")
    changed = profiles.load(path, stack="next").values()
    arguments = ("--shutdown-timeout=45", "--max-num-seqs=32", "--enforce-eager")
    assert [(profile.about, profile.arguments()) for profile in changed] == [(about, arguments) for about in "abc"]
    assert profiles.named("trial", path, stack="next").variables() == {"X": "2"}
    with pytest.raises(UsageError):
        profiles.named("trial", path)


@pytest.mark.parametrize("stack", [name for name, stack in pins.load().stacks.items() if stack.image])
def test_responses_are_stored_where_the_store_is_bounded(stack):
    """Patch 0011 bounds the store; without it the server's memory would grow."""
    names = {patch.name for _, queue in series.queues(pins.load(), stack) for patch in queue.patches}
    bounded = "0011-bound-the-store-of-responses.patch" in names
    names = {"safe", "safe-piecewise", "safe-no-graphs", "fast", "long-context", "fast-load", "spark-mxfp4"}
    for_gpus = names & profiles.load(stack=stack).keys()
    for name in ["embedded"] if stack == "embedded" else for_gpus:
        stored = profiles.named(name, stack=stack).variables()["VLLM_ENABLE_RESPONSES_API_STORE"]
        assert bounded == (stored == "1")
