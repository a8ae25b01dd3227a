# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Grammars are compiled in a process that ends with its client and by its CPU time."""

import asyncio
import os
import string
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vllm.exceptions import VLLMValidationError

KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
SLOW = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string"} for i in range(4000)},
}


def wanted(**value):
    """What a request asks for, as StructuredOutputsParams has it."""
    return SimpleNamespace(**(dict.fromkeys(KINDS) | value))


@pytest.fixture
def compiler(monkeypatch):
    """A compiler with a bound of one second, for a vocabulary of single letters."""
    from vllm.v1.structured_output.isolated import CPU_SECONDS, IsolatedCompiler

    monkeypatch.setenv(CPU_SECONDS, "1")
    letters = {
        letter: number for number, letter in enumerate(["<eos>", *string.printable])
    }
    model = models.WordLevel(letters, unk_token="<eos>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), eos_token="<eos>"
    )
    compiler = IsolatedCompiler(tokenizer, len(letters))
    yield compiler
    compiler.close()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "value",
    [
        {"json": {"type": "object"}},
        {"json": {"type": "string", "pattern": "^[a-z]{0,300}$"}},
        {"regex": "[a-z]{1,9}"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {},
    ],
    ids=str,
)
def test_usual_grammar(compiler, value):
    assert asyncio.run(compiler.check(wanted(**value))) == ""


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"grammar": "root ::= ((("}, "EBNF"),
        ({"regex": r"\p{L}+"}, "not supported"),
        ({"json": {"type": "string", "minLength": -1}}, "repetition range"),
        ({"structural_tag": "[]"}, ""),
    ],
    ids=str,
)
def test_what_is_wrong(compiler, value, fault):
    reason = asyncio.run(compiler.check(wanted(**value)))
    assert reason
    assert fault in reason
    assert ".cc:" not in reason  # no file of xgrammar's


def test_grammar_that_takes_too_long(compiler):
    with pytest.raises(VLLMValidationError, match="grammar-seconds"):
        asyncio.run(compiler.check(wanted(json=SLOW)))


class Burning:
    """A matcher whose masks take longer and longer."""

    def __init__(self, seconds, length=100):
        self.seconds, self.left = seconds, length

    def accept_token(self, _token):
        self.left -= 1
        return True

    def is_terminated(self):
        return not self.left

    def fill_next_token_bitmask(self, _mask):
        assert self.left, "xgrammar raises an error then"
        self.seconds = min(2 * self.seconds, 0.2)
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass


def test_grammar_whose_tokens_take_too_long(compiler, monkeypatch):
    from vllm.v1.structured_output.isolated import is_slow

    allowed = numpy.full(4, -1, numpy.int32)
    assert is_slow(numpy, Burning(0.01), allowed)
    assert not is_slow(numpy, Burning(0, 1), allowed)
    assert not is_slow(numpy, Burning(0.01), numpy.zeros(4, numpy.int32))

    async def slow(_message):
        return b"slow"

    monkeypatch.setattr(compiler, "_ask", slow)
    with pytest.raises(VLLMValidationError, match="0.1 s of CPU time a token"):
        asyncio.run(compiler.check(wanted(regex="a*")))


def test_client_that_leaves_takes_its_compilation_along(compiler):
    async def leave():
        await compiler.check(wanted(regex="a"))
        helper = compiler._helper.pid
        slow = asyncio.create_task(compiler.check(wanted(json=SLOW)))
        await until(lambda: children(helper))
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await until(lambda: not children(helper))
        return slow.cancelled()

    assert asyncio.run(leave())


def test_helper_that_was_killed_is_started_again(compiler):
    async def kill():
        await compiler.check(wanted(regex="a"))
        first = compiler._helper
        os.kill(first.pid, 9)
        await until(lambda: first.poll() is not None)
        await compiler.check(wanted(regex="b"))
        return compiler._helper.pid != first.pid

    assert asyncio.run(kill())


def test_helper_is_small_and_starts_before_the_first_request(compiler):
    async def start():
        compiler.start_in_background()
        await asyncio.wrap_future(compiler._started)
        return Path(f"/proc/{compiler._helper.pid}/maps").read_text()

    libraries = asyncio.run(start())
    assert "xgrammar" in libraries
    assert "libtorch" not in libraries
