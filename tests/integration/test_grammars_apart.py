"""Patch 0030 of vLLM's queues: grammars are compiled in a process that ends with its client and by its CPU time."""

import asyncio
import os
import string
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.integration

KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
SLOW = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}


def wanted(**value):
    """What a request asks for, as vLLM's StructuredOutputsParams has it."""
    return SimpleNamespace(**(dict.fromkeys(KINDS) | value))


@pytest.fixture
def compiler(monkeypatch):
    """A compiler with a bound of one second, for a vocabulary of single letters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm.v1.structured_output.isolated import CPU_SECONDS, IsolatedCompiler

    monkeypatch.setenv(CPU_SECONDS, "1")
    letters = {letter: number for number, letter in enumerate(["<eos>", *string.printable])}
    model = models.WordLevel(letters, unk_token="<eos>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<eos>")
    compiler = IsolatedCompiler(tokenizer, len(letters))
    yield compiler
    compiler.close()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a state of the kernel
            await asyncio.sleep(0.02)


def test_usual_grammars_pass_and_a_wrong_one_is_left_to_vllm(compiler):
    async def ask():
        for value in (
            {"json": {"type": "object"}},
            {"regex": "[a-z]{1,9}"},
            {"choice": ["a", "b"]},
            {"grammar": 'root ::= "a"'},
            {"grammar": "root ::= ((("},
            {},
        ):
            await compiler.check(wanted(**value))

    asyncio.run(ask())


def test_a_grammar_that_takes_too_long_is_refused_by_name(compiler):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="grammar-seconds"):
        asyncio.run(compiler.check(wanted(json=SLOW)))


def test_a_client_that_leaves_takes_its_compilation_along(compiler):
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


def test_a_helper_that_was_killed_is_started_again(compiler):
    async def kill():
        await compiler.check(wanted(regex="a"))
        first = compiler._helper
        os.kill(first.pid, 9)
        await until(lambda: first.poll() is not None)
        await compiler.check(wanted(regex="b"))
        return compiler._helper.pid != first.pid

    assert asyncio.run(kill())
