"""The start's benchmark against a stub server: what its tokens a second count."""

import pytest

from lab import startup
from sparkforge.core.errors import ServerError


def test_tokens_a_second_count_whole_answers_to_different_prompts(stub, endpoint):
    assert startup._tokens_per_second(endpoint, 2) > 0
    prompts = [body["prompt"] for _, body, _ in stub.bodies]
    assert len(set(prompts)) == len(prompts) == 2 * startup.REQUESTS_PER_SLOT
    assert stub.generated == len(prompts) * startup.TOKENS


def test_a_failed_request_gives_no_figure(stub, endpoint):
    stub.lie = "truncated"
    with pytest.raises(ServerError, match="12 of 12 requests failed"):
        startup._tokens_per_second(endpoint, 2)
