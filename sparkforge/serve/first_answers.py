"""The tiny model's recorded answers: before a GPU serves a larger model, its kernels must reproduce them."""

from pathlib import Path
from statistics import fmean

from sparkforge.core import openai
from sparkforge.core.errors import ServerError
from sparkforge.core.files import read_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.tables import Record

ANSWERS = Path(__file__).with_name("first_answers.json")  # by lab/first_answers.py, in float32
TOKENS = 12  # generated after each prompt
MARGIN = 2.0  # smallest lead of a token's logit over the next best, so that rounding changes no token
LIMIT = 0.10  # mean difference of the log probabilities: bfloat16 gives 0.012 on a CPU, and 8 bits round more


class Answer(Record):
    """A prompt, the tokens that follow greedily, and the log probability of every token but the first."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def compare(endpoint: Endpoint) -> float:
    """Return the mean difference of log probabilities from the recorded ones. Raises ServerError above LIMIT."""
    differences: list[float] = []
    for answer in (Answer.model_validate(row) for row in read_json(ANSWERS)["answers"]):
        tokens = [*answer.prompt, *answer.tokens]
        greedy = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        try:
            generated = endpoint.complete(list(answer.prompt), **greedy)["choices"][0]["token_ids"]
            scored = endpoint.complete(tokens, max_tokens=1, temperature=0, prompt_logprobs=1)["choices"][0]
            _first, *tables = scored["prompt_logprobs"]
            scores = [float(table[str(token)]["logprob"]) for token, table in zip(tokens[1:], tables, strict=True)]
        except openai.NO_ANSWER as error:
            raise _wrong(f"the answer to {len(answer.prompt)} tokens has another form: {error!r}") from error
        if tuple(generated) != answer.tokens:
            raise _wrong(f"after {len(answer.prompt)} tokens it generates {generated}, not {list(answer.tokens)}")
        differences += [abs(own - there) for own, there in zip(scores, answer.logprobs, strict=True)]
    if not fmean(differences) <= LIMIT:
        raise _wrong(f"log probabilities differ by {fmean(differences):.2f} on average; rounding gives {LIMIT} at most")
    return fmean(differences)


def _wrong(why: str) -> ServerError:
    fix = "./inv validate   # names the part that computes wrongly; or another --profile"
    return ServerError("the tiny model's first answers are wrong", why, fix, code="server.reply")
