"""The o200k Harmony vocabulary, as the tokenizer files that transformers and vLLM read.

`openai_harmony` (distribution oss-harmony, a dependency of vLLM) holds the vocabulary inside its library, so nothing
is downloaded. It is imported when a function needs it, because the launcher's environment does not have it.
"""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

from sparkforge.core.errors import InputError
from sparkforge.core.files import write_atomic

VOCAB_SIZE = 201_088  # config.json of openai/gpt-oss-20b and -120b
BASE_TOKENS = 199_998  # o200k_base without its special tokens; Harmony's follow
# tiktoken names this hash for o200k_base.tiktoken (tiktoken_ext/openai_public.py).
VOCABULARY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
CHAT_TEMPLATE = Path(__file__).with_name("harmony.jinja")
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION, _LEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"[^\r\n\p{L}\p{N}]?"
# How o200k splits text before merging (tiktoken_ext/openai_public.py, o200k_base).
SPLIT = "|".join([
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}", f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip


def offline_environment() -> dict[str, str]:
    """Return the variables that keep a server from downloading a model or a vocabulary.

    oss-harmony needs no variable: it reads its built-in vocabulary unless TIKTOKEN_ENCODINGS_BASE is set.
    """
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@cache
def base_vocabulary() -> tuple[bytes, ...]:
    """Return the bytes of the 199,998 base tokens by id. Raises InputError without the right openai_harmony."""
    tokens = tuple(_token_bytes(i) for i in range(BASE_TOKENS))
    digest = hashlib.sha256(_tiktoken_bytes(tokens)).hexdigest()
    if digest != VOCABULARY_SHA256:
        failure = "the o200k vocabulary is not the known one"
        why = f"openai_harmony gave sha256 {digest}, not {VOCABULARY_SHA256}"
        raise InputError(failure, why, "./inv up   # installs the pinned oss-harmony again", code="input.model")
    return tokens


def special_tokens() -> dict[str, int]:
    """Return Harmony's special and reserved tokens with their ids, 199,998 to 201,087, in the order of ids."""
    # oss-harmony has one id more than the model has rows; the range of ids leaves it out.
    return {_token_bytes(i).decode(): i for i in range(BASE_TOKENS, VOCAB_SIZE)}


def write_vocabulary(directory: Path) -> Path:
    """Write `o200k_base.tiktoken` into `directory` and return its path, for programs with TIKTOKEN_ENCODINGS_BASE."""
    path = directory / "o200k_base.tiktoken"
    write_atomic(path, _tiktoken_bytes(base_vocabulary()))
    return path


def encode(text: str) -> list[int]:
    """Return the tokens of `text`, in which `<|start|>` and the like are special tokens. Raises InputError."""
    return list(_encoding().encode(text, allowed_special="all"))


def decode(tokens: list[int]) -> str:
    """Return the text of `tokens`, with special tokens written as `<|start|>` and the like. Raises InputError."""
    return b"".join(map(_token_bytes, tokens)).decode(errors="replace")


def tokenizer_files() -> dict[str, bytes]:
    """Return the tokenizer's files (name → bytes): tokenizer.json, its configuration, special tokens, chat template."""
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    config = {
        **names,
        # As in the published checkpoint. Without this key transformers parses tokenizer.json twice.
        "added_tokens_decoder": {str(i): {"content": token, **ADDED} for token, i in special_tokens().items()},
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 1_000_000_000,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {"tokenizer_config.json": to_json(config), "special_tokens_map.json": to_json(names)}
    return {"tokenizer.json": _tokenizer(), **files, "chat_template.jinja": CHAT_TEMPLATE.read_bytes()}


@cache
def _encoding():  # type: ignore[no-untyped-def]  # noqa: ANN202 (openai_harmony is untyped and imported late)
    try:
        from openai_harmony import load_harmony_encoding  # noqa: PLC0415
    except ImportError as error:
        failure, fix = "cannot make the tokenizer", "./inv up   # makes the embedded runtime, whose Python has it"
        raise InputError(failure, f"this Python has no openai_harmony ({error})", fix, code="input.model") from error
    return load_harmony_encoding("HarmonyGptOss")


def _token_bytes(token: int) -> bytes:
    # The public function `decode` returns text, and most tokens are not complete UTF-8 text.
    return bytes(_encoding()._inner.decode_bytes([token]))  # noqa: SLF001


def _tiktoken_bytes(tokens: tuple[bytes, ...]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))


@cache  # it takes seconds
def _tokenizer() -> bytes:
    """Return tokenizer.json: byte-level BPE whose merges give tiktoken's result.

    tiktoken merges the two neighbours whose joined bytes have the lowest rank. So every split of a token into two
    tokens is a merge, in the order of the joined token's rank.
    """
    tokens = base_vocabulary()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    # Each byte's printable letter in byte-level BPE (tokenizers, ByteLevel).
    letters = {**{byte: byte for byte in printable}, **{byte: 256 + i for i, byte in enumerate(hidden)}}
    text = [token.decode("latin-1").translate(letters) for token in tokens]
    rank = {token: i for i, token in enumerate(tokens)}
    merges = [
        [text[rank[token[:cut]]], text[rank[token[cut:]]]]
        for token in tokens for cut in range(1, len(token)) if token[:cut] in rank and token[cut:] in rank
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return to_json({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": token, **ADDED} for token, i in special_tokens().items()],
        "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None,
            # tiktoken does not merge a piece that is itself a token.
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {written: i for i, written in enumerate(text)}, "merges": merges,
        },
    }, indent=None)  # fmt: skip


def to_json(value: object, indent: int | None = 2) -> bytes:
    """Return a JSON file of a checkpoint; without indentation also without spaces."""
    separators = None if indent else (",", ":")
    return (json.dumps(value, indent=indent, separators=separators, ensure_ascii=False) + "\n").encode()
