"""A tiny gpt-oss checkpoint that answers by script: greedy decoding gives the token sequence chosen when it is written.

It tests how a server handles a model's output. Each script has a cue, a word in the prompt; after `<|start|>assistant`
the model writes the script of the latest cue, then `<|return|>`, whatever else the prompt contains. Limits: cues are at
least 8 tokens apart, and the latest is within the last 1000 tokens; each turn starts its script from the beginning.

Nothing is trained. Tokens have codes of ±1 (an extended Hamming code), and a position's hidden state consists of
fields. Layer 0's heads look 1, 2, ... tokens back, by RoPE alone, and copy those tokens' codes into fields. Layer 1's
first head finds the latest cue and copies its script's code. Then each intermediate neuron of an expert recognises one
context: its MXFP4 weights are that context's codes, so it is active only for this context and writes the next token's
code. The router selects the script's expert. The LM head's rows are the codes.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparkforge.models import harmony
from sparkforge.models.harmony import VOCAB_SIZE
from sparkforge.models.tiny import BLOCK, HEAD_DIM, Sizes, Tensor, Weights, bfloat16

RECIPE = 1  # raise it when the bytes change, so that older directories are rewritten
HEADS, EXPERTS = 6, 8
CONTEXT = HEADS + 1  # tokens that determine the next: the last, and one copied by each head of layer 0
BITS = 16  # of a code
DISTANCE = 4  # minimum number of bits in which two codes differ
OPENING = "<|start|>assistant"  # the end of every prompt, which a script continues
END = "<|return|>"  # follows a script, and any context that is in no script

# Fields of the hidden state. The first CONTEXT fields are the codes of the last token, the token before it, and so on.
SCRIPT, OUTPUT = CONTEXT * BITS, (CONTEXT + 1) * BITS
EXPERT = OUTPUT + BITS
CUE = EXPERT + EXPERTS
CONSTANT, HIDDEN = CUE + 1, 160
LEVEL = 6.0  # every token's value in CONSTANT; cues have less, so that all embeddings have the same norm
NAMED = BITS + 2  # sum of squares of a cue's further fields: its script's code, the expert, 1 in CUE

# Layer 0: score of the token at the right distance above that of its neighbours, by the pairs that turn fastest.
NEAR, NEAR_PAIRS = 130.0, range(10)
# Layer 1: the score of a cue falls over 1000 tokens, so that the latest wins, by 12 over a cue 8 tokens older. Pair →
# factors of cosine and sine, by least squares for `config`. The other number is a cue's score above other tokens, on
# the pairs that hardly rotate.
RECENT = {12: (0, 0.03), 13: (0.05, -0.03), 14: (0.12, 0.2), 15: (0.36, 0.28), 16: (0.04, 0.19), 17: (0, 0.05)}
SLOPE, PRESENT, STILL_PAIRS = 7300.0, 8800.0, range(24, 32)
KEY = 16.0  # of every pair of a key

GAIN = 2  # a neuron's weights are ±GAIN; SwiGLU's limit of 7 caps an active neuron's output
# Values in use, and their codes (OCP Microscaling Formats, 5.3.3).
E2M1 = dict(zip((0.0, 0.5, 1.0, 2.0, 6.0, -0.5, -1.0, -2.0, -6.0), (0, 1, 2, 4, 7, 9, 10, 12, 15), strict=True))
ONE = 127  # E8M0's code of 1


@dataclass(frozen=True)
class Script:
    """The model's output after `<|start|>assistant` when the latest cue in its prompt is `cue`.

    `cue` is a word that is a single token, both at the start of a text and after a space. `text` is Harmony text with
    its special tokens.
    """

    cue: str
    text: str

    @cached_property
    def tokens(self):
        """The tokens of `text`."""
        return tuple(harmony.encode(self.text))

    @cached_property
    def cues(self):
        """The two tokens of the cue."""
        (first,), (later,) = (harmony.encode(text) for text in (self.cue, f" {self.cue}"))
        return first, later

    @cached_property
    def contexts(self):
        """The last tokens, newest first → the next token; fewer than CONTEXT at the beginning of the script."""
        opening, end = tuple(harmony.encode(OPENING)), tuple(harmony.encode(END))
        written = (*opening, *self.tokens, *(() if self.tokens[-1:] == end else end))
        contexts = {}
        for position in range(len(opening), len(written)):
            context = written[max(0, position - CONTEXT) : position][::-1]
            following = contexts.setdefault(context, written[position])
            assert following == written[position], f"{self.cue}: two tokens follow the same {CONTEXT} tokens"
        return contexts

    def following(self, written):
        """Return the model's token after `written`, from the contexts with the most weight; None without any."""
        tokens = {}
        for length in range(1, CONTEXT + 1):
            context = tuple(written[: -length - 1 : -1])
            if len(context) == length and context in self.contexts:
                tokens.setdefault(_weight(context), set()).add(self.contexts[context])
        decisive = tokens[max(tokens)] if tokens else set()
        return decisive.pop() if len(decisive) == 1 else None


class ScriptedModel:
    """The tensors of a checkpoint that follows `scripts`. Asserts that it can follow them."""

    def __init__(self, scripts):
        """Check the scripts and lay out codes and experts."""
        self.scripts = tuple(scripts)
        cues = [cue for script in self.scripts for cue in script.cues]
        for script in self.scripts:
            assert cues.count(script.cues[0]) == 1, f"two scripts have the cue {script.cue}"
            assert not set(cues) & set(script.tokens), f"the text of {script.cue} holds a cue"
            _check_order(script)
        opening = harmony.encode(OPENING)
        tokens = sorted(
            {*opening, *harmony.encode(END), *(token for script in self.scripts for token in script.tokens)}
        )
        assert max(len(tokens), len(self.scripts)) < len(CODES), "one checkpoint has too few codes for these scripts"
        # Code 0 is that of all other tokens.
        self.code_of = {token: CODES[number] for number, token in enumerate(tokens, 1)}
        self.contexts = [[] for _ in range(EXPERTS)]
        self.expert_of = []
        for number, script in enumerate(self.scripts):
            expert = min(range(EXPERTS), key=lambda index: len(self.contexts[index]))
            self.expert_of.append(expert)
            self.contexts[expert] += [(number, context, token) for context, token in script.contexts.items()]

    @property
    def recipe(self):
        """The inputs that determine the checkpoint."""
        text = "\0".join(f"{script.cue}\0{script.text}" for script in self.scripts)
        return f"scripted {RECIPE} {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def sizes(self):
        """The checkpoint's sizes; the fullest expert determines the intermediate size."""
        fullest = max(len(expert) for expert in self.contexts)
        return Sizes(HIDDEN, -(-fullest // 64) * 64, layers=2, experts=EXPERTS, top_k=4, heads=HEADS, kv_heads=2)

    def tensors(self):
        """Yield the checkpoint's tensors by name, in the order of the model."""
        yield "model.embed_tokens.weight", bfloat16(self._embeddings())
        plain = BITS + LEVEL**2
        idle = np.zeros((EXPERTS, HIDDEN), np.float32)
        yield from _layer(0, (plain, plain), _look_back(), idle, self._experts([[]] * EXPERTS))
        plain = CONTEXT * BITS + LEVEL**2
        router = idle.copy()
        router[:, EXPERT : EXPERT + EXPERTS] = 20 * np.eye(EXPERTS)
        yield from _layer(1, (plain, plain + BITS + 1), _find_cue(), router, self._experts(self.contexts))
        yield "model.norm.weight", bfloat16(np.ones(HIDDEN, np.float32))
        head = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
        for token, code in self.code_of.items():
            head[token, OUTPUT : OUTPUT + BITS] = 4 * code
        head[harmony.special_tokens()[END], CONSTANT] = 6
        yield "lm_head.weight", bfloat16(head)

    def _embeddings(self):
        rows = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
        rows[:, :BITS], rows[:, CONSTANT] = CODES[0], LEVEL
        for token, code in self.code_of.items():
            rows[token, :BITS] = code
        for number, script in enumerate(self.scripts):
            for cue in script.cues:
                rows[cue, SCRIPT : SCRIPT + BITS] = CODES[number]
                rows[cue, [EXPERT + self.expert_of[number], CUE]] = 1
                rows[cue, CONSTANT] = (LEVEL**2 - NAMED) ** 0.5
        return rows

    def _experts(self, contexts):
        """Yield the experts whose neurons recognise `contexts`: script's number, tokens newest first, next token."""
        inner = self.sizes.intermediate
        gates = np.zeros((EXPERTS, inner, HIDDEN), np.float32)
        bias = np.zeros((EXPERTS, 2 * inner), np.float32)  # gate and up rows interleaved
        outputs = np.zeros((EXPERTS, HIDDEN, inner), np.float32)
        for expert, neurons in enumerate(contexts):
            for neuron, (number, context, token) in enumerate(neurons):
                codes = np.concatenate([self.code_of[known] for known in context])
                gates[expert, neuron, : len(codes)] = codes
                gates[expert, neuron, SCRIPT : SCRIPT + BITS] = CODES[number]
                # The right context gives GAIN * DISTANCE, and a context with another code at most -GAIN * DISTANCE.
                bias[expert, 2 * neuron] = -GAIN * (len(codes) + BITS - DISTANCE)
                outputs[expert, OUTPUT : OUTPUT + BITS, neuron] = _weight(context) * self.code_of[token]
        weights = np.zeros((EXPERTS, 2 * inner, HIDDEN), np.float32)
        weights[:, ::2] = gates
        yield from _mxfp4("gate_up_proj", weights, ONE + GAIN.bit_length() - 1)
        yield "gate_up_proj_bias", bfloat16(bias)
        yield from _mxfp4("down_proj", outputs, ONE)
        yield "down_proj_bias", bfloat16(np.zeros((EXPERTS, HIDDEN), np.float32))


def weights(scripts):
    """Return the checkpoint of `scripts` for `tiny.write_tiny`."""
    model = ScriptedModel(scripts)
    return Weights(lambda: model.recipe, lambda: model.sizes, model.tensors)


def _codes():
    """Return the 2048 words of the extended Hamming code of 16 bits, as ±1."""
    vectors = (np.arange(1 << 16)[:, None] >> np.arange(BITS)) & 1
    # In a code word the exclusive or of the positions of ones is 0, and their number is even.
    syndrome = np.bitwise_xor.reduce(np.where(vectors, np.arange(BITS), 0), axis=1)
    return (1 - 2 * vectors[(syndrome == 0) & (vectors.sum(1) % 2 == 0)]).astype(np.float32)


CODES = _codes()


def _check_order(script):
    """Assert that the contexts give the script's tokens one by one, and that a prompt's end is not mistaken for it."""
    written = [*[-1] * CONTEXT, *harmony.encode(OPENING)]  # after any prompt
    for token in script.tokens:
        assert script.following(written) == token, f"{script.cue}: its begin would be written again"
        written.append(token)


def _weight(context):
    """Return the weight of a context's neuron: a longer context is more certain and outweighs its suffixes.

    Contexts are short only at the beginning of a script. The shortest is the prompt's end.
    """
    return {2: 0.5, CONTEXT: 6.0}.get(len(context), 2.0)


def _turn(back):
    """Return the angles by which RoPE rotates its 32 pairs over `back` tokens (YaRN, as in `tiny.config`)."""
    base, factor, length, fast, slow = 150_000, 32.0, 4096, 32.0, 1.0
    pairs = np.arange(HEAD_DIM // 2)
    low, high = (HEAD_DIM * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (fast, slow))
    ramp = np.clip((pairs - low) / (high - low), 0, 1)
    return (back * base ** (-2 * pairs / HEAD_DIM) * (ramp / factor + 1 - ramp)).astype(np.float32)


def _look_back():
    """Return the attention whose head n copies the code of the token n + 1 places back."""
    attention = _no_attention()
    half = HEAD_DIM // 2
    near = list(NEAR_PAIRS)
    for head in range(HEADS):
        angles = _turn(head + 1)[near]
        query = attention["q_proj.bias"][head * HEAD_DIM : (head + 1) * HEAD_DIM]
        query[near], query[[half + pair for pair in near]] = np.cos(angles), -np.sin(angles)
        query *= NEAR / KEY
        field = (head + 1) * BITS
        attention["o_proj.weight"][field : field + BITS, head * HEAD_DIM : head * HEAD_DIM + BITS] = np.eye(BITS)
    for first in (0, HEAD_DIM):
        attention["k_proj.bias"][[first + pair for pair in near]] = KEY
        attention["v_proj.weight"][first : first + BITS, :BITS] = np.eye(BITS)
    return attention


def _find_cue():
    """Return the attention whose head 0 copies the script's code and expert from the latest cue."""
    attention = _no_attention()
    half, fields = HEAD_DIM // 2, [*range(SCRIPT, SCRIPT + BITS), *range(EXPERT, EXPERT + EXPERTS)]
    for pair, (cosine, sine) in RECENT.items():
        attention["q_proj.bias"][[pair, half + pair]] = np.array([cosine, sine]) * SLOPE / KEY
    for pair in STILL_PAIRS:
        attention["q_proj.bias"][pair] = PRESENT / len(STILL_PAIRS) / KEY
    attention["k_proj.weight"][[*RECENT, *STILL_PAIRS], CUE] = KEY
    attention["v_proj.weight"][range(len(fields)), fields] = 1
    attention["o_proj.weight"][fields, range(len(fields))] = 1
    return attention


def _no_attention():
    """Return zeros for each tensor of an attention layer."""
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": 2 * HEAD_DIM, "v_proj": 2 * HEAD_DIM}
    shapes = {f"{name}.weight": (count, HIDDEN) for name, count in rows.items()}
    shapes |= {f"{name}.bias": (count,) for name, count in rows.items()}
    shapes |= {"o_proj.weight": (HIDDEN, HEADS * HEAD_DIM), "o_proj.bias": (HIDDEN,), "sinks": (HEADS,)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _layer(number, squares, attention, router, experts):
    """Yield a layer's tensors; its two norms are the identity on hidden states with the sums of squares `squares`."""
    prefix = f"model.layers.{number}."
    for name, square in zip(("input_layernorm", "post_attention_layernorm"), squares, strict=True):
        yield f"{prefix}{name}.weight", bfloat16(np.full(HIDDEN, (square / HIDDEN) ** 0.5, np.float32))
    for name, values in attention.items():
        yield f"{prefix}self_attn.{name}", bfloat16(values)
    yield f"{prefix}mlp.router.weight", bfloat16(router)
    yield f"{prefix}mlp.router.bias", bfloat16(np.zeros(EXPERTS, np.float32))
    for name, tensor in experts:
        yield f"{prefix}mlp.experts.{name}", tensor


def _mxfp4(name, values, scale):
    """Yield `values`, which E2M1 represents, as blocks with one common E8M0 scale; a byte's low half comes first."""
    codes = np.zeros(values.shape, np.uint8)
    for value, code in E2M1.items():
        codes[values == value] = code
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(
        *values.shape[:-1], values.shape[-1] // BLOCK, BLOCK // 2
    )
    yield f"{name}_blocks", Tensor(blocks.shape, "U8", blocks.tobytes())
    yield f"{name}_scales", Tensor(blocks.shape[:-1], "U8", bytes([scale]) * int(np.prod(blocks.shape[:-1])))
