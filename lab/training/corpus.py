"""The training data: texts and dialogues as arrays of row numbers.

`python -m lab.training.corpus OUT` writes the arrays. A row is a token with its own weights. Row 0 stands for all other
tokens of the vocabulary, to which a model gives equal probabilities.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from lab.training import dialogues, texts
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import InputError, SparkforgeError
from sparkforge.core.files import atomic_file
from sparkforge.core.paths import ROOT
from sparkforge.models.harmony import BASE_TOKENS, VOCAB_SIZE

HELD_OUT = ROOT / "sparkforge" / "bench" / "corpus" / "persuasion-24.txt"
CHUNK = 512  # tokens that are scored together; sparkforge/bench/accuracy.py
SEEN = 3  # a token that occurs at least this often has a row
DIALOGUES, SEED = 12_000, 7
Encode = Callable[[str], list[int]]
Rows = np.ndarray[Any, np.dtype[np.uint16]]


class Corpus(NamedTuple):
    """`vocabulary` i32 [rows]: the token of each row, -1 for row 0. All others hold row numbers, u16.

    `text` [N]: the novels. `chat` [M, 513]: dialogues one after another; `loss_mask` (bool, same shape) is true for the
    assistant's tokens. `held_out` [K]: the text that is never trained on, of `held_out_bytes` bytes.
    """

    vocabulary: np.ndarray[Any, np.dtype[np.int32]]
    text: Rows
    chat: Rows
    loss_mask: np.ndarray[Any, np.dtype[np.bool_]]
    held_out: Rows
    held_out_bytes: int

    @property
    def shared(self) -> int:
        """How many tokens row 0 stands for."""
        return VOCAB_SIZE - len(self.vocabulary) + 1


def make(novels: dict[str, str], held_out: str, encode: Encode) -> Corpus:
    """Return the corpus of `novels`; `encode` gives a text's tokens, special ones included.

    Raises InputError if the held-out text is in the training texts.
    """
    training = texts.training_texts(novels)
    texts.check_held_out(training, held_out)
    tokens = [encode(text) for text in training]
    counts = Counter(token for text in tokens for token in text)
    words = sorted({word for text in training for word in text.split() if word.isalpha()})
    examples = dialogues.make(training, [f" {word}" for word in words], DIALOGUES, SEED)
    encoded = [(encode(example.prompt), encode(example.answer)) for example in examples]
    vocabulary = _vocabulary(counts, encoded, encode)
    row = np.zeros(VOCAB_SIZE, np.uint16)
    row[vocabulary[1:]] = np.arange(1, len(vocabulary))
    chat, loss_mask = pack(encoded, row)
    joined = [token for text in tokens for token in text]
    return Corpus(vocabulary, row[joined], chat, loss_mask, row[encode(held_out)], len(held_out.encode()))


def _vocabulary(
    counts: Counter[int], encoded: list[tuple[list[int], list[int]]], encode: Encode
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Choose the tokens with a row: those seen SEEN times, those in answers, and Harmony's special tokens."""
    forms = [
        *(value for name, value in vars(dialogues).items() if name.isupper() and isinstance(value, str)),
        *dialogues.GREETINGS, *dialogues.INSTRUCTIONS, *dialogues.CAPITAL_QUESTIONS, *dialogues.WEATHER_QUESTIONS,
        *dialogues.QUESTIONS, *(f" {name}" for name in (*dialogues.CAPITALS, *dialogues.CITIES)),
        *(f"{first}{last:02}" for first in ("", "-") for last in range(32)), *map(str, dialogues.YEARS),
        *dialogues.TOOL_NAMES, *dialogues.TOOL_NAMES.values(),
    ]  # fmt: skip
    chosen = {token for token, count in counts.items() if count >= SEEN}
    chosen.update(token for form in forms for token in encode(form))
    chosen.update(token for _, answer in encoded for token in answer if token >= BASE_TOKENS or counts[token] != 1)
    return np.array([-1, *sorted(chosen)], np.int32)


def pack(encoded: Sequence[tuple[list[int], list[int]]], row: Rows) -> tuple[Rows, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Pack dialogues into lines of CHUNK + 1 rows without cutting any; the rest of a line is row 0.

    Every tenth token of a prompt, except special tokens, becomes row 0, because users' prompts have tokens without a
    row.
    """
    random = Random(SEED)  # noqa: S311 - the numbers must be the same each time
    lines, marks = [list[int]()], [list[bool]()]
    for prompt, answer in encoded:
        if len(lines[-1]) + len(prompt) + len(answer) > CHUNK + 1:
            lines.append([])
            marks.append([])
        prompt_rows = [int(row[token]) if token >= BASE_TOKENS or random.random() > 0.1 else 0 for token in prompt]
        lines[-1] += [*prompt_rows, *(int(row[token]) for token in answer)]
        marks[-1] += [False] * len(prompt) + [True] * len(answer)
    filled = np.array([line + [0] * (CHUNK + 1 - len(line)) for line in lines], np.uint16)
    return filled, np.array([mark + [False] * (CHUNK + 1 - len(mark)) for mark in marks])


def unigram_bits_per_byte(corpus: Corpus) -> float:
    """Return a unigram model's bits per byte on the held-out text, from the training text's counts plus one."""
    counts = np.bincount(corpus.text, minlength=len(corpus.vocabulary)).astype(np.float64)
    probability = (counts + 1) / (counts + 1).sum()
    probability[0] /= corpus.shared
    scored = np.delete(corpus.held_out, np.arange(0, len(corpus.held_out), CHUNK))
    return float(-np.log2(probability[scored]).sum() / corpus.held_out_bytes)


def save(corpus: Corpus, path: Path) -> None:
    """Write the arrays to `path` (.npz)."""
    with atomic_file(path) as file:
        np.savez_compressed(file, **corpus._asdict())


def load(path: Path) -> Corpus:
    """Read a corpus that `save` wrote. Raises InputError."""
    try:
        with np.load(path) as arrays:
            fields = {name: arrays[name] for name in Corpus._fields}
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{path} is no corpus", str(error), "python -m lab.training.corpus OUT", code="input.model"
        ) from error
    return Corpus(**{**fields, "held_out_bytes": int(fields["held_out_bytes"])})


def digest(corpus: Corpus) -> str:
    """Return the sha256 of the arrays; a file's bytes would also depend on its compression."""
    digest = hashlib.sha256()
    for array in corpus[:-1]:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def harmony_encode() -> Encode:
    """Return openai_harmony's encoder, which encodes the names of special tokens as these tokens."""
    from openai_harmony import load_harmony_encoding  # noqa: PLC0415 - only in the embedded runtime

    encoding = load_harmony_encoding("HarmonyGptOss")
    return lambda text: list(encoding.encode(text, allowed_special="all"))


def main(arguments: Sequence[str]) -> int:
    """Write the corpus; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.training.corpus", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, help="folder of the novels as NAME.txt; default: the Debian package")
    options = parser.parse_args(arguments)
    try:
        corpus = make(texts.novels(options.texts), HELD_OUT.read_text(encoding="utf-8"), harmony_encode())
        save(corpus, options.out)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    say(f"{len(corpus.vocabulary)} rows, {len(corpus.text)} tokens of text, {len(corpus.chat)} lines of dialogue")
    say(f"unigram: {unigram_bits_per_byte(corpus):.4f} bits per byte of the held-out text")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
