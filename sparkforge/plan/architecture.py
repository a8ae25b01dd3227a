"""A gpt-oss model's sizes, from its config.json: weights by part and format, and the KV cache by layer type.

The one place in the project that computes either. All sizes are bytes; all counts follow from config.json alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core.documents import DocumentError, read_json
from sparkforge.core.errors import InputError
from sparkforge.core.tables import Record

FULL, SLIDING = "full_attention", "sliding_attention"
MODEL_TYPE = "gpt_oss"
# Bits a weight, its scale included. MXFP4: 32 four-bit values and one eight-bit scale (OCP Microscaling Formats v1.0,
# table 1); MXFP8 likewise. q8_0: llama.cpp's 32 eight-bit values and one 16-bit scale. fp8: one scale a row, left out.
BITS = {"bf16": 16.0, "fp8": 8.0, "mxfp8": 8.25, "mxfp4": 4.25, "q8_0": 8.5}
BLOCK = 32  # MXFP4 elements that share one scale
KV_BYTES = {"bf16": 2, "fp8": 1}  # a key or value element; vLLM's --kv-cache-dtype auto is the model's own bf16
KV_BLOCK = 16  # tokens a block of the KV cache: vLLM 0.32.0, vllm/config/cache.py DEFAULT_BLOCK_SIZE
STEPS_UNDER_WAY = 2  # with asynchronous scheduling, vLLM's own choice: vllm/config/vllm.py, max_concurrent_batches
DECODING = STEPS_UNDER_WAY  # tokens that a decoding sequence has in flight: one a step
LARGEST = 10**9  # no size in a config.json is larger; keeps arithmetic within sense
CONFIG_BYTES = 10_000_000  # a config.json is a few kilobytes
GET = "./inv plan gpt-oss-120b   # or a folder or config.json of a gpt-oss model"


class KnownModel(Record):
    """The sizes in a model's config.json, and their source. `tensor_bytes`: of all weights, None if not known."""

    config: dict[str, Any]
    source: str
    sizes: str = ""  # a safetensors file beside the table whose metadata has the sizes
    tensor_bytes: int | None = None
    tensor_bytes_source: str = ""


@dataclass(frozen=True)
class DenseFormat:
    """How a server keeps what gpt-oss has in bf16: the attention's projections and the LM head. Keys of BITS."""

    attention: str = "bf16"
    head: str = "bf16"

    @property
    def name(self) -> str:
        """Both in a few words."""
        return self.attention if self.attention == self.head else f"{self.attention}, {self.head} head"


BF16 = DenseFormat()


@dataclass(frozen=True)
class Part:
    """Weights of one kind over all layers: `count` elements in `form`, and `plain` elements (biases) in bf16."""

    name: str
    form: str
    count: int
    plain: int = 0

    @property
    def bytes(self) -> int:
        """Bytes on disk and, before a kernel pads them, in memory."""
        return int(self.count * BITS[self.form] / 8) + 2 * self.plain


@dataclass(frozen=True)
class Architecture:
    """A gpt-oss model's sizes, by the names of its config.json. `window` is in tokens, `experts_form` a key of BITS."""

    hidden: int
    intermediate: int
    layers: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int
    sliding_layers: int
    longest: int
    tied: bool
    experts_form: str

    @property
    def full_layers(self) -> int:
        """Layers whose attention sees the whole sequence."""
        return self.layers - self.sliding_layers

    @property
    def attention(self) -> int:
        """Weights of one layer's query, key, value and output projections, without biases."""
        return self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def expert(self) -> int:
        """Weights of one expert of one layer: gate and up, and down; without biases."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert of one layer, biases included."""
        return self.expert * BITS[self.experts_form] / 8 + 2 * (2 * self.intermediate + self.hidden)

    def parts(self, dense: DenseFormat = BF16) -> tuple[Part, ...]:
        """Return all weights. A tied LM head stays as the embedding is, in bf16."""
        n, h, i, e = self.layers, self.hidden, self.intermediate, self.experts
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Part("embedding", "bf16", self.vocab * h),
            Part("attention qkv", dense.attention, n * h * (queries + 2 * keys), n * (queries + 2 * keys)),
            Part("attention o", dense.attention, n * h * queries, n * h),
            Part("attention sinks", "bf16", n * self.heads),
            Part("router", "bf16", n * e * h, n * e),
            Part("experts gate, up", self.experts_form, n * e * 2 * i * h, n * e * 2 * i),
            Part("experts down", self.experts_form, n * e * h * i, n * e * h),
            Part("norms", "bf16", (2 * n + 1) * h),
            Part("lm_head", dense.head, 0 if self.tied else self.vocab * h),
        )

    def weight_bytes(self, dense: DenseFormat = BF16) -> int:
        """Bytes of all weights; by default as the checkpoint stores them."""
        return sum(part.bytes for part in self.parts(dense))

    def padding_bytes(self, align: int) -> int:
        """Bytes that a kernel adds when it pads the experts' sizes to multiples of `align` (1: none)."""
        h, i = (-(-size // align) * align for size in (self.hidden, self.intermediate))
        padded = 3 * h * i * BITS[self.experts_form] / 8 + 2 * (2 * i + h)
        return int(self.layers * self.experts * (padded - self.expert_bytes))

    def kv_layer_token(self, kv: str) -> int:
        """Bytes that one token takes in one layer's KV cache; `kv` is a key of KV_BYTES."""
        return 2 * self.kv_heads * self.head_dim * KV_BYTES[kv]

    def kv_read(self, context: int, kv: str) -> int:
        """Bytes of keys and values that one decoded token reads behind `context` tokens."""
        tokens = self.full_layers * context + self.sliding_layers * min(context, self.window)
        return tokens * self.kv_layer_token(kv)

    def kv_held(self, context: int, kv: str) -> int:
        """Bytes of KV blocks that a sequence of `context` tokens holds while it decodes.

        vLLM's hybrid allocator: a full layer keeps every token; a sliding one the last window - 1, those in flight, and
        one block more, as a window begins anywhere in a block (vllm/v1/kv_cache_interface.py, SlidingWindowSpec).
        """
        return self.kv_admitted(context, DECODING, kv)

    def kv_admitted(self, context: int, in_flight: int, kv: str) -> int:
        """Bytes that must be free before vLLM admits a sequence of up to `context` tokens.

        A sliding layer also keeps the tokens of the steps under way, `in_flight` of them: STEPS_UNDER_WAY steps of
        --max-num-batched-tokens (vllm/config/vllm.py, max_in_flight_tokens).
        """
        whole = -(-context // KV_BLOCK)
        kept = -(-min(self.window - 1 + in_flight, context) // KV_BLOCK) + 1
        return (self.full_layers * whole + self.sliding_layers * kept) * KV_BLOCK * self.kv_layer_token(kv)


def read(path: Path) -> Architecture:
    """Read a config.json, or the one in a folder. Raises InputError for anything but a gpt-oss model's."""
    file = path / "config.json" if path.is_dir() else path
    try:
        value = read_json(file, largest=CONFIG_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {file}", error.strerror or str(error), GET, code="input.config") from error
    except DocumentError as error:
        raise InputError(f"{file} cannot be read", error.why, GET, code="input.config") from error
    return parse(value, str(file))


def parse(config: Any, where: str) -> Architecture:
    """Return the architecture of a config.json's content. `where` names it in errors. Raises InputError."""
    if not isinstance(config, Mapping):
        raise InputError(f"{where} is no model's configuration", "it holds no table of keys", GET, code="input.config")
    if config.get("model_type") != MODEL_TYPE:
        why = f"its model_type is {str(config.get('model_type'))[:60]!r}, the formulas here are for {MODEL_TYPE}"
        raise InputError(f"{where} is of another architecture", why, GET, code="input.config")
    layers = _size(config, "num_hidden_layers", where)
    heads, hidden = _size(config, "num_attention_heads", where), _size(config, "hidden_size", where)
    model = Architecture(
        hidden=hidden,
        intermediate=_size(config, "intermediate_size", where),
        layers=layers,
        experts=_size(config, "num_local_experts", where),
        top_k=_size(config, "num_experts_per_tok", where),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", where),
        head_dim=_size(config, "head_dim", where) if "head_dim" in config else max(1, hidden // heads),
        vocab=_size(config, "vocab_size", where),
        window=_size(config, "sliding_window", where),
        sliding_layers=_sliding(config.get("layer_types"), layers, where),
        longest=_size(config, "max_position_embeddings", where),
        tied=config.get("tie_word_embeddings") is True,
        experts_form=_form(config.get("quantization_config"), where),
    )
    problem = ""
    if model.top_k > model.experts:
        problem = f"a token takes {model.top_k} of {model.experts} experts"
    elif model.heads % model.kv_heads:
        problem = f"{model.heads} heads do not share {model.kv_heads} key-value heads evenly"
    elif model.experts_form == "mxfp4" and (model.hidden % BLOCK or model.intermediate % BLOCK):
        problem = f"MXFP4 needs hidden and intermediate sizes in multiples of {BLOCK}"
    if problem:
        raise InputError(f"{where} makes no sense", problem, GET, code="input.config")
    return model


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value <= LARGEST:
        state = f"it is {str(value)[:60]!r}" if key in config else "it is missing"
        why = f"{state}, a whole number above 0 is needed"
        raise InputError(f"{where}: {key} makes no sense", why, GET, code="input.config")
    return value


def _sliding(types: Any, layers: int, where: str) -> int:
    """Count the sliding layers; without a list gpt-oss alternates and begins with one (transformers, GptOssConfig)."""
    if types is None:
        return (layers + 1) // 2
    if not isinstance(types, Sequence) or len(types) != layers or not all(t in (FULL, SLIDING) for t in types):
        why = f"it must name {layers} layers, each {FULL} or {SLIDING}"
        raise InputError(f"{where}: layer_types makes no sense", why, GET, code="input.config")
    return list(types).count(SLIDING)


def _form(quantization: Any, where: str) -> str:
    """Return the form of the experts' weights; a checkpoint without quantization_config holds bf16."""
    if quantization is None:
        return "bf16"
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method != "mxfp4":
        why = f"its quantization is {str(method)[:60]!r}; known are mxfp4 and none"
        raise InputError(f"{where}: the weights' format is not known", why, GET, code="input.config")
    return "mxfp4"
