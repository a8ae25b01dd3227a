"""What a start proves: requests whose answers are forced, for every model of the vocabulary."""

import pytest

from sparkforge.serve import proof


def test_the_biased_tokens_are_those_of_the_vocabulary():
    pytest.importorskip("openai_harmony")  # ./inv test --fast installs none
    from sparkforge.models import harmony

    assert (harmony.encode("final"), harmony.encode(" to")) == ([int(proof.FINAL)], [int(proof.TO)])


def test_a_limit_is_one_of_a_call_that_is_sent():
    assert set(proof.LIMITS) <= set(proof.CALLS)
