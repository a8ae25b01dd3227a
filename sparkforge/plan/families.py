"""families.toml: the families of models that the project knows, one row each, and the formulas of their sizes.

No other module names a family, an architecture or a parser: other modules read the row of their model's family.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictFloat, StrictInt, StrictStr

from sparkforge.core import tables
from sparkforge.core.errors import InputError
from sparkforge.core.tables import Record

TABLE = Path(__file__).with_name("families.toml")
LIST = "./inv models   # lists the families and recipes that are known"
UNQUANTIZED = "none"
Form = Literal["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: lambda a, b: a // max(1, b),
}  # fmt: skip


def _formula(text: str) -> str:
    evaluate(text, lambda _name: 1)
    return text


Formula = Annotated[str, AfterValidator(_formula)]


class Reason(Record):
    """The value of a flag, a variable or a parser, and why."""

    value: StrictStr | StrictInt | StrictFloat = ""
    why: str = Field(min_length=1)


class Stored(Record):
    """A checkpoint's formats with one quantisation method: of experts, and of all other layers except the LM head."""

    experts: Form = "bf16"
    dense: Form = "bf16"


class PartRow(Record):
    """Weights of one kind over all layers: formulas of the elements in `form` (`count`) and of those in bf16 (`plain`).

    The form `experts` is the experts' format; `attention` and `dense` are that of the dense layers, but a server may
    quantise `attention` further; `router` and `bf16` are bf16. Embedding and LM head are the same in all families, so
    no row has them.
    """

    name: str
    form: Literal["attention", "dense", "router", "experts", "bf16"]
    count: Formula
    plain: Formula = "0"


class Sizes(Record):
    """Formulas over keys of config.json and the sizes above; a formula that is a single name needs a value above 0."""

    hidden: Formula = "hidden_size"
    layers: Formula = "num_hidden_layers"
    heads: Formula = "num_attention_heads"
    kv_heads: Formula = "num_key_value_heads"
    head_dim: Formula = "head_dim or hidden // heads"
    vocab: Formula = "vocab_size"
    longest: Formula = "max_position_embeddings"
    experts: Formula = "0"
    top_k: Formula = "0"
    intermediate: Formula = "0"  # of one routed expert
    active: Formula = "top_k * intermediate"  # summed width of the MLPs that compute a token in a layer
    expert_layers: Formula = "layers"
    draft_layers: Formula = "0"  # on disk and not loaded
    sliding_layers: Formula = "0"
    linear_layers: Formula = "0"
    window: Formula = "0"
    kv_elements: Formula = "2 * kv_heads * head_dim"  # of a token in a full or sliding layer's KV cache
    score_flops: Formula = "4 * heads * head_dim"  # of attention for a pair of tokens in one layer
    state: Formula = "0"  # bytes of a sequence of any length in all linear layers


class Experts(Record):
    """The routed experts as vLLM's FusedMoEConfig names them, and the backend expected for them.

    `selector` names vLLM's function that selects a backend: its module in fused_moe/oracle, which is named after the
    experts' format; the function; the keys of weights and activations. `backends`: compute capability → stack → the
    expected result; `why` has the reason. `methods` are vLLM's names of the allowed quantisation methods; empty: any.
    `ours`: serve profile → why a server with it runs MXFP4 experts on our kernels.
    """

    activation: str
    bias: bool
    routing: str
    selector: tuple[str, ...] = Field(min_length=2)
    methods: tuple[str, ...] = ()
    backends: dict[str, dict[str, str]] = Field(default_factory=dict)
    why: str = ""
    ours: dict[str, str] = Field(default_factory=dict)


class Chat(Record):
    """The family's message format.

    With `asks_for_reasoning`, --reasoning-parser is passed; otherwise vLLM chooses the parser by the model. `tokens`
    are the token ids that start-up requests (serve/proof.py) force by a logit bias. Without `tokens`, no forced request
    and no canary is sent, and each chat gets the keys of `request`, so that a grammar applies from the first token.
    """

    tokenizer: str
    format: str
    tool_call_parser: Reason
    reasoning_parser: Reason
    asks_for_reasoning: bool = True
    tokens: dict[str, int] = Field(default_factory=dict)
    request: dict[str, Any] = Field(default_factory=dict)


class Family(Record):
    """One row. `without` lists flags and variables of serve profiles to leave out, because they are for other experts.

    `served` is the default model. `sinks`: whether attention has sinks. vLLM may select `attention_backends` on 12.x;
    empty: any. `tiny` names the tiny checkpoint that tests the family without hardware, empty for none.
    """

    about: str
    model_type: str
    architectures: tuple[str, ...]
    quantization: dict[str, Stored]
    sinks: bool = False
    attention_backends: tuple[str, ...] = ()
    experts: Experts | None = None
    chat: Chat
    without: tuple[str, ...] = ()
    served: str = ""
    tiny: str = ""
    sizes: Sizes
    parts: tuple[PartRow, ...]

    def flags(self) -> dict[str, Reason]:
        """The vLLM flags that the family needs in addition to those of a serve profile."""
        flags = {"--tool-call-parser": self.chat.tool_call_parser}
        return flags | ({"--reasoning-parser": self.chat.reasoning_parser} if self.chat.asks_for_reasoning else {})


class Families(Record):
    """The whole table; its first row is the family of the default models."""

    families: dict[str, Family]


@cache
def load(table: Path = TABLE) -> Mapping[str, Family]:
    """Return every family by name. Raises InputError."""
    return tables.load(table, Families).families


def default() -> str:
    """Return the family of the default models."""
    return next(iter(load()))


def defaults() -> tuple[str, ...]:
    """Return the default models: the large one, and the tiny one without a GPU."""
    row = load()[default()]
    return row.served, row.tiny


def name_of(config: Any, where: str) -> str:
    """Return the family of a config.json's content. `where` names the file in errors. Raises InputError."""
    if not isinstance(config, Mapping):
        raise InputError(f"{where} is not a model's configuration", "it is not an object", LIST, code="input.config")
    kind, known = str(config.get("model_type")), load()
    name = next((name for name, family in known.items() if family.model_type == kind), "")
    if not name:
        kinds = ", ".join(family.model_type for family in known.values())
        why = f"its model_type is {kind[:60]!r}, and the known types are {kinds}"
        raise InputError(f"{where} has an unknown architecture", why, LIST, code="input.config")
    named = config.get("architectures")
    if named is not None and (not isinstance(named, list) or not set(map(str, named)) & {*known[name].architectures}):
        loaded = ", ".join(known[name].architectures)
        why = f"its architectures are {str(named)[:80]}, and those of {kind} are {loaded}"
        raise InputError(f"{where} has an unknown architecture", why, LIST, code="input.config")
    return name


def stored(config: Mapping[str, Any], name: str, where: str) -> Stored:
    """Return the formats of a checkpoint's weights. Raises InputError for a quantisation that the family lacks."""
    method, known = method_of(config), load()[name].quantization
    if method in known:
        return known[method]
    why = f"its quantization is {method[:60]!r}; {name} has {', '.join(known)}"
    raise InputError(f"{where}: the weights' format is not known", why, LIST, code="input.config")


def method_of(config: Mapping[str, Any]) -> str:
    """Return the quantisation of a config.json: `none`, vLLM's method, or two methods joined by a plus."""
    settings = config.get("quantization_config")
    if settings is None:
        return UNQUANTIZED
    if not isinstance(settings, Mapping):
        return str(settings)
    routed = settings.get("routed_experts_quant_method") or config.get("expert_dtype")
    groups, method = settings.get("config_groups"), settings.get("quant_method")
    mixed = (isinstance(groups, Mapping) and len(groups) > 1) or settings.get("quant_algo") == "MIXED_PRECISION"
    method = settings.get("format", method) if method == "compressed-tensors" else method
    return f"{method}{f'+{routed}' if routed else ''}{' of several formats' if mixed else ''}"


def evaluate(formula: str, value: Callable[[str], int | None]) -> int | None:
    """Return the value of a formula of numbers, names, + - * //, `a or b` (the first known value), `a if b else c`.

    `value` returns the value of a name, None if it does not exist. Raises ValueError for other syntax, KeyError with
    the name for arithmetic with a missing value.
    """

    def number(node: ast.expr) -> int:
        result = visit(node)
        if result is None:
            raise KeyError(node.id if isinstance(node, ast.Name) else ast.unparse(node))
        return result

    def visit(node: ast.expr) -> int | None:
        match node:
            case ast.Constant(value=int(constant)):
                return constant
            case ast.Name(id=name):
                return value(name)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATIONS:
                return OPERATIONS[type(sign)](number(left), number(right))
            case ast.BoolOp(op=ast.Or(), values=values):
                return next((result for result in map(visit, values) if result is not None), None)
            case ast.IfExp(test=test, body=body, orelse=otherwise):
                return visit(body) if visit(test) else visit(otherwise)
        raise ValueError(f"{ast.unparse(node)} has no meaning in a formula")

    try:
        tree = ast.parse(formula, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{formula!r} is not a formula") from error
    return visit(tree)
