# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store of the Responses API is bounded."""

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest

from vllm.entrypoints.openai.responses import serving
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

MAX_ENTRIES = 3


class Serving(OpenAIServingResponses):
    """The stores alone, without an engine."""

    def __init__(self):
        self.enable_store = True
        self.use_harmony = False
        self.response_store, self.msg_store, self.event_store = {}, {}, {}
        self.response_store_lock = asyncio.Lock()
        self.background_tasks = {}

    def store(self, response_id, num_events=0):
        """Store a response as `responses_full_generator` does."""
        self.response_store[response_id] = SimpleNamespace(
            id=response_id, status="completed", output=[]
        )
        self.msg_store[response_id] = []
        if num_events:
            self.event_store[response_id] = (deque(range(num_events)), None)
        if hasattr(self, "_remove_unused"):  # for the tests without it
            self._remove_unused()

    def retrieve(self, response_id, stream=False):
        return asyncio.run(self.retrieve_responses(response_id, None, stream))


@pytest.fixture
def responses(monkeypatch):
    monkeypatch.setenv("VLLM_RESPONSES_API_STORE_MAX_ENTRIES", str(MAX_ENTRIES))
    return Serving()


def stored(responses):
    assert set(responses.msg_store) == set(responses.response_store)
    assert set(responses.event_store) <= set(responses.response_store)
    return list(responses.response_store)


def test_the_last_are_kept(responses):
    for number in range(10):
        responses.store(str(number), num_events=1)
    assert stored(responses) == ["7", "8", "9"]


def test_one_that_is_used_is_kept(responses):
    for number in range(10):
        responses.store(str(number))
        assert responses.retrieve("0").id == "0"
    assert stored(responses) == ["8", "9", "0"]


def test_one_that_runs_in_the_background_is_kept(responses):
    responses.background_tasks["0"] = object()
    for number in range(10):
        responses.store(str(number), num_events=1)
    assert stored(responses) == ["0", "8", "9"]
    del responses.background_tasks["0"]
    responses.store("10")
    assert stored(responses) == ["8", "9", "10"]


def test_events_are_bounded(responses, monkeypatch):
    monkeypatch.setattr(serving, "_MAX_STORED_EVENTS", 10, raising=False)
    responses.background_tasks["0"] = object()
    for number in range(3):
        responses.store(str(number), num_events=6)
    assert stored(responses) == ["0", "1", "2"]
    assert list(responses.event_store) == ["0", "2"]
    assert responses.retrieve("1", stream=True).error.code == 404


@pytest.mark.parametrize(
    ("enabled", "reason"),
    [(True, "one of the last 3"), (False, "VLLM_ENABLE_RESPONSES_API_STORE=1")],
)
def test_refusal_says_why_and_what_to_do(responses, enabled, reason):
    responses.enable_store = enabled
    error = responses.retrieve("none").error
    assert error.code == 404
    assert reason in error.message
    assert "`input`" in error.message
