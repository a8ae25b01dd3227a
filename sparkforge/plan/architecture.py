"""A model's sizes, from its config.json: weights by part and format, and the KV cache by layer type.

No other module computes these sizes. The formulas are in families.toml, in the row of the model's family. All sizes are
bytes; all counts follow from config.json alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkforge.core.errors import InputError
from sparkforge.core.files import DocumentError, read_json
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import SPECULATION
from sparkforge.plan import families

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Bits per weight, with its share of the scale. MXFP4: 32 four-bit values and one eight-bit scale (OCP Microscaling
# Formats v1.0, table 1); MXFP8 likewise. NVFP4: one scale per 16 values. q8_0: llama.cpp's 32 eight-bit values and one
# 16-bit scale. fp8: one scale per row, not counted.
BITS = {"bf16": 16.0, "fp8": 8.0, "mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5, "q8_0": 8.5}
BLOCK = 32  # MXFP4 elements that share one scale
KV_BYTES = {"bf16": 2, "fp8": 1}  # a key or value element; vLLM's --kv-cache-dtype auto is the model's own bf16
KV_BLOCK = 16  # tokens in a block of the KV cache: vLLM 0.32.0, vllm/config/cache.py DEFAULT_BLOCK_SIZE
STATES = 2  # blocks per sequence and linear layer (vllm/v1/kv_cache_interface.py, MambaSpec, mamba_cache_mode "align")
LATENT_BLOCK = 128  # tokens; a block of latent attention in a model with linear layers is a multiple of this size
STEPS_UNDER_WAY = 2  # with asynchronous scheduling, vLLM's default (vllm/config/vllm.py, max_concurrent_batches)
DECODING = STEPS_UNDER_WAY  # tokens that a decoding sequence has in flight: one a step
TOLERANCE = 0.02  # share of the computed bytes: formulas leave out some tensors, such as scales of FP8 blocks
LARGEST = 10**9  # larger sizes in a config.json are refused
CONFIG_BYTES = 10_000_000  # a config.json is a few kilobytes


class Draft(Record):
    """The drafter that proposes a model's next tokens, as in vLLM's --speculative-config.

    In each step the drafter proposes `tokens` tokens and reads its weights (`bytes`) `passes` times: `tokens` times if
    it proposes one token after another, once if it proposes a block, 0 times if it only searches a table. `repository`
    is empty if the checkpoint contains the drafter, or if the drafter has no weights.
    """

    method: str
    tokens: int = Field(ge=1)
    passes: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    repository: str = ""
    source: str = Field(min_length=1)

    def flag(self) -> str:
        """Return vLLM's flag; a draft model is in /models, where a container sees the folder that ./inv pull fills."""
        model = f', "model": "/models/{self.repository.rpartition("/")[2]}"' if self.repository else ""
        method = f'{{"method": "{self.method}", "num_speculative_tokens": {self.tokens}{model}}}'
        return f"{SPECULATION}='{method}'"


class KnownModel(Record):
    """The sizes in a model's config.json, and their source. `tensor_bytes` is the size of all weights, None if unknown.

    `repository` is OWNER/NAME on the hub, empty for none.
    """

    config: dict[str, Any]
    source: str
    tensor_bytes: int | None = Field(default=None, ge=1)
    tensor_bytes_source: str = ""
    repository: str = ""
    drafts: dict[str, Draft] = Field(default_factory=dict)


@dataclass(frozen=True)
class DenseFormat:
    """The formats of attention's projections and of the LM head: keys of BITS. bf16 means the checkpoint's format."""

    attention: str = "bf16"
    head: str = "bf16"

    @property
    def name(self) -> str:
        """Short text that names both formats."""
        return self.attention if self.attention == self.head else f"{self.attention}, {self.head} head"


BF16 = DenseFormat()


@dataclass(frozen=True)
class Part:
    """Weights of one kind over all layers: `count` elements in `form`, and `plain` elements (biases) in bf16.

    `role` is the column `form` of the part's row in families.toml, or `embedding` or `head`, which have no row.
    """

    name: str
    form: str
    count: int
    plain: int = 0
    role: str = ""

    @property
    def bytes(self) -> int:
        """Bytes on disk, and in memory without a kernel's padding."""
        return int(self.count * BITS[self.form] / 8) + 2 * self.plain


@dataclass(frozen=True)
class Architecture:
    """A model's sizes, by the names of families.toml. `window` is in tokens, the forms are keys of BITS.

    A dense model has no experts. For one token in one layer, `active` is the summed width of the MLPs that process the
    token, and `kv_elements` is its number of elements in the KV cache. `score_flops` are the operations of attention
    for a pair of tokens in one layer. `state` is the bytes that all linear layers keep for a sequence of any length.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    longest: int
    experts: int
    top_k: int
    intermediate: int
    active: int
    expert_layers: int
    draft_layers: int
    sliding_layers: int
    linear_layers: int
    window: int
    kv_elements: int
    score_flops: int
    state: int
    tied: bool
    experts_form: str
    dense_form: str
    between: tuple[Part, ...]  # the parts between embedding and LM head, as the checkpoint stores them

    @property
    def full_layers(self) -> int:
        """Layers whose attention sees the whole sequence."""
        return self.layers - self.sliding_layers - self.linear_layers

    @property
    def latent(self) -> bool:
        """Whether the KV cache holds latent vectors, which heads share, in place of keys and values."""
        return self.kv_elements != 2 * self.kv_heads * self.head_dim

    @property
    def expert(self) -> int:
        """Number of weights of one expert in one layer (gate, up, down), without biases."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert of one layer, biases included."""
        return self.expert * BITS[self.experts_form] / 8 + self._biases(self.hidden, self.intermediate)

    def _biases(self, hidden: int, intermediate: int) -> int:
        experts = families.load()[self.family].experts
        return 2 * (2 * intermediate + hidden) if experts and experts.bias else 0

    def parts(self, dense: DenseFormat = BF16) -> tuple[Part, ...]:
        """Return all weights. A tied LM head has 0 elements, because it is the embedding, which stays in bf16."""
        words = self.vocab * self.hidden
        attention = self.dense_form if dense.attention == BF16.attention else dense.attention
        return (
            Part("embedding", "bf16", words, role="embedding"),
            *(replace(part, form=attention) if part.role == "attention" else part for part in self.between),
            Part("lm_head", dense.head, 0 if self.tied else words, role="head"),
        )

    def weight_bytes(self, dense: DenseFormat = BF16) -> int:
        """Bytes of all weights; by default as the checkpoint stores them."""
        return sum(part.bytes for part in self.parts(dense))

    def disagreement(self, stored: int) -> str:
        """Return how a checkpoint's `stored` bytes of tensors contradict its config.json; empty if they do not.

        A draft layer, which is on disk and not loaded, is about as large as the largest layer.
        """
        expected = self.weight_bytes()
        draft = self.draft_layers * (self.experts * self.expert_bytes + 4 * self.hidden * self.hidden)
        if expected * (1 - TOLERANCE) <= stored <= (expected + draft) * (1 + TOLERANCE):
            return ""
        return f"by config.json the tensors have {expected / 1e9:.2f} GB, the files have {stored / 1e9:.2f}"

    def padding_bytes(self, align: int) -> int:
        """Bytes that a kernel adds when it pads MXFP4 experts' sizes to multiples of `align` (1: none)."""
        if self.experts_form != "mxfp4":
            return 0
        h, i = (-(-size // align) * align for size in (self.hidden, self.intermediate))
        padded = 3 * h * i * BITS[self.experts_form] / 8 + self._biases(h, i)
        return int(self.expert_layers * self.experts * (padded - self.expert_bytes))

    def kv_layer_token(self, kv: str) -> int:
        """Bytes that one token takes in one layer's KV cache; `kv` is a key of KV_BYTES."""
        return self.kv_elements * KV_BYTES[kv]

    def kv_token(self, kv: str) -> int:
        """Bytes that one token takes in the KV cache of all layers that have one."""
        return (self.layers - self.linear_layers) * self.kv_layer_token(kv)

    def kv_read(self, context: int, kv: str) -> int:
        """Bytes of keys, values and states that a decode step of one sequence reads after `context` tokens."""
        tokens = self.full_layers * context + self.sliding_layers * min(context, self.window)
        return tokens * self.kv_layer_token(kv) + self.state

    def kv_held(self, context: int, kv: str) -> int:
        """Bytes of KV blocks that a sequence of `context` tokens holds while it decodes.

        In vLLM's hybrid allocator a full layer keeps every token. A sliding layer keeps the last window - 1 tokens, the
        tokens in flight, and one more block because a window may begin inside a block (SlidingWindowSpec in
        vllm/v1/kv_cache_interface.py).
        """
        return self.kv_admitted(context, DECODING, kv)

    def kv_admitted(self, context: int, in_flight: int, kv: str) -> int:
        """Bytes that must be free before vLLM admits a sequence of up to `context` tokens.

        A sliding layer also keeps the `in_flight` tokens of the steps under way: STEPS_UNDER_WAY steps of
        --max-num-batched-tokens (vllm/config/vllm.py, max_in_flight_tokens). If a model has linear layers, vLLM makes
        every block so large that it holds a linear layer's state (vllm/platforms/interface.py,
        _align_hybrid_block_size). With prefix caching, which is on by default, a sequence has STATES blocks in each
        linear layer.
        """
        block, layer = KV_BLOCK, self.kv_layer_token(kv)
        if self.linear_layers:
            step = LATENT_BLOCK if self.latent else KV_BLOCK
            block = -(-self.state // self.linear_layers // (step * layer)) * step
        whole = -(-context // block)
        kept = -(-min(self.window - 1 + in_flight, context) // block) + 1 if self.sliding_layers else 0
        blocks = self.full_layers * whole + self.sliding_layers * kept + STATES * self.linear_layers
        return blocks * block * layer


def read(path: Path) -> Architecture:
    """Read `path`, a config.json or its folder. Raises InputError if it cannot be read or its family is not known."""
    file = path / "config.json" if path.is_dir() else path
    try:
        value = read_json(file, largest=CONFIG_BYTES)
    except OSError as error:
        failure = f"cannot read {file}"
        raise InputError(failure, error.strerror or str(error), families.LIST, code="input.config") from error
    except DocumentError as error:
        raise InputError(f"{file} cannot be read", error.why, families.LIST, code="input.config") from error
    return parse(value, str(file))


def parse(config: Any, where: str) -> Architecture:
    """Return the architecture of a config.json's content. `where` names the file in errors. Raises InputError."""
    name = families.name_of(config, where)
    family, stored = families.load()[name], families.stored(config, name, where)
    sizes: dict[str, int] = {}
    text = config.get("text_config")  # of a model with a vision tower
    config = {**config, **(text if isinstance(text, Mapping) else {})}

    def value(key: str) -> int | None:
        """Return a size that is computed already, or the key's value in config.json."""
        if key in (FULL, SLIDING, LINEAR):
            return _count(config.get("layer_types"), key, sizes["layers"], where)
        return sizes[key] if key in sizes else _number(config, key, where)

    def computed(formula: str) -> int:
        try:
            result = families.evaluate(formula, value)
        except KeyError as error:
            raise _senseless(where, error.args[0], "it is missing") from error
        if result is None or (result < 1 and formula.isidentifier()):
            state = "missing" if result is None else result
            raise _senseless(where, formula, f"it is {state}, a whole number above 0 is needed")
        return result

    for size, formula in family.sizes:
        sizes[size] = computed(formula)
    sizes["full_layers"] = sizes["layers"] - sizes["sliding_layers"] - sizes["linear_layers"]
    forms = {"attention": stored.dense, "dense": stored.dense, "experts": stored.experts}
    parts = tuple(
        Part(row.name, forms.get(row.form, "bf16"), computed(row.count), computed(row.plain), row.form)
        for row in family.parts
    )
    del sizes["full_layers"]
    tied = config.get("tie_word_embeddings") is True
    model = Architecture(
        family=name, tied=tied, experts_form=stored.experts, dense_form=stored.dense, between=parts, **sizes
    )
    blocks = (model.hidden, model.intermediate) if model.experts_form == "mxfp4" else ()
    layers = (model.full_layers, model.expert_layers, *(part.count for part in model.between))
    problems = {
        f"a token takes {model.top_k} of {model.experts} experts": model.top_k > model.experts,
        f"{model.heads} heads do not share {model.kv_heads} key-value heads evenly": model.heads % model.kv_heads,
        f"MXFP4 needs hidden and intermediate sizes in multiples of {BLOCK}": any(size % BLOCK for size in blocks),
        "it has more layers of one kind than layers in all": min(layers) < 0,
    }
    if problem := next((text for text, applies in problems.items() if applies), ""):
        raise InputError(f"{where} makes no sense", problem, families.LIST, code="input.config")
    return model


def _number(config: Mapping[str, Any], key: str, where: str) -> int | None:
    content = config.get(key)
    if isinstance(content, list):
        return len(content)
    if content is None or (type(content) is int and 0 <= content <= LARGEST):
        return content
    raise _senseless(where, key, f"it is {str(content)[:60]!r}, a whole number is needed")


def _senseless(where: str, key: str, why: str) -> InputError:
    return InputError(f"{where}: {key} makes no sense", why, families.LIST, code="input.config")


def _count(types: Any, kind: str, layers: int, where: str) -> int | None:
    if types is None:
        return None
    if not isinstance(types, Sequence) or len(types) != layers or not all(t in (FULL, SLIDING, LINEAR) for t in types):
        why = f"it must name {layers} layers, each {FULL}, {SLIDING} or {LINEAR}"
        raise _senseless(where, "layer_types", why)
    return list(types).count(kind)
