"""Tiny random checkpoints of families that have none of their own: the same bytes on every machine, nothing downloaded.

Bytes are the vocabulary, beside the special tokens of ChatML and of tool calls, so any text can be read and written.
"""

import hashlib
import json

import numpy as np

from sparkforge.models.tiny_format import bfloat16, to_safetensors

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, EXPERTS, TOP_K = 64, 2, 4, 2, 32, 64, 8, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB = 320  # 256 bytes, the special tokens, and some that nothing stands for
TURN = "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    f"{{%- for message in messages %}}{TURN}{{% endfor %}}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
COMMON = {
    "attention_bias": False, "bos_token_id": 256, "eos_token_id": 258, "head_dim": HEAD_DIM, "hidden_act": "silu",
    "hidden_size": HIDDEN, "intermediate_size": 2 * WIDTH, "max_position_embeddings": 40960,
    "max_window_layers": LAYERS,
    "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": VOCAB, "transformers_version": "4.55.0",
}  # fmt: skip
CONFIGS = {
    "qwen3": {**COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {
        **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": WIDTH, "norm_topk_prob": True, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
}  # fmt: skip


def uniform(name, shape, amplitude):
    raw = hashlib.shake_256(name.encode()).digest(int(np.prod(shape)))
    values = 2.0 * np.frombuffer(raw, np.uint8).astype(np.float32) - 255.0
    return bfloat16((values * np.float32(amplitude / 256)).reshape(shape))


def norm(name, size):
    raw = np.frombuffer(hashlib.shake_256(name.encode()).digest(size), np.uint8)
    return bfloat16((raw // 4 + np.float32(96)) / np.float32(128))


def mlp(prefix, width):
    for part in ("gate", "up"):
        yield f"{prefix}.{part}_proj.weight", uniform(prefix + part, (width, HIDDEN), 0.25)
    yield f"{prefix}.down_proj.weight", uniform(prefix + "down", (HIDDEN, width), 0.125)


def tensors(family):
    yield "model.embed_tokens.weight", uniform("embed", (VOCAB, HIDDEN), 2.0)
    yield "model.norm.weight", norm("norm", HIDDEN)
    yield "lm_head.weight", uniform("lm_head", (VOCAB, HIDDEN), 1.0)
    rows = {"q": (HEADS, True), "k": (KV_HEADS, True), "v": (KV_HEADS, True), "o": (HEADS, False)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", norm(layer + name, HIDDEN)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", norm(layer + name, HEAD_DIM)
        for name, (heads, into) in rows.items():
            shape = (heads * HEAD_DIM, HIDDEN) if into else (HIDDEN, heads * HEAD_DIM)
            yield f"{layer}.self_attn.{name}_proj.weight", uniform(layer + name, shape, 0.25)
        if family == "qwen3":
            yield from mlp(f"{layer}.mlp", 2 * WIDTH)
            continue
        yield f"{layer}.mlp.gate.weight", uniform(layer + "gate", (EXPERTS, HIDDEN), 0.25)
        for expert in range(EXPERTS):
            yield from mlp(f"{layer}.mlp.experts.{expert}", WIDTH)


def tokenizer():
    """A byte-level tokenizer without merges: a token a byte (its letters are those of GPT-2's table of bytes)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    added = [
        {"id": 256 + n, "content": text, "special": n < 3, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for n, text in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "merges": [],
                  "vocab": {letters[byte]: byte for byte in range(256)}},
    }  # fmt: skip


def write(folder, family):
    """Write the checkpoint of a family of CONFIGS into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 40960}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "model.safetensors").write_bytes(to_safetensors(dict(tensors(family)), {"format": "pt"}))
    return folder
