"""Tiny random checkpoints of families without one: the same weights everywhere, and no downloads.

The vocabulary is the 256 bytes and the special tokens of ChatML and of tool calls, so any text can be read and written.
The family's class in transformers defines the tensors, and writes them under the names of its checkpoints.
"""

import hashlib
import json
import shutil

import numpy as np

HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 64, 8, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB = 320  # 256 bytes, the special tokens, and unused ids
TURN = "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    f"{{%- for message in messages %}}{TURN}{{% endfor %}}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
COMMON = {
    "attention_bias": False, "bos_token_id": 256, "eos_token_id": 258, "hidden_act": "silu", "hidden_size": HIDDEN,
    "intermediate_size": 2 * WIDTH, "max_position_embeddings": 40960, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "vocab_size": VOCAB,
    "dtype": "bfloat16",
}  # fmt: skip
ROUTED = {"moe_intermediate_size": WIDTH, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
QWEN3 = {"head_dim": 32, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False}
CONFIGS = {
    "qwen3": {**COMMON, **QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_window_layers": 2},
    "qwen3-moe": {
        **COMMON, **QWEN3, **ROUTED, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "glm4-moe-lite": {
        **COMMON, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "num_key_value_heads": 4,
        "first_k_dense_replace": 1, "kv_lora_rank": 512, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS,
        "n_shared_experts": 1, "num_experts_per_tok": TOP_K, "q_lora_rank": 32, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64, "v_head_dim": 32,  # the CPU kernel requires 512 + 64
    },
    "qwen3_5-moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {
            **COMMON, **ROUTED, "model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "head_dim": 32,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_value_head_dim": 128, "shared_expert_intermediate_size": WIDTH,
        },
        "vision_config": {
            "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "num_position_embeddings": 4,
            "out_hidden_size": HIDDEN, "patch_size": 2,
        },
    },
}  # fmt: skip


def values(name, shape):
    """Return values from the name's hash: norms around 1, vectors around 0, matrices small enough for bf16."""
    raw = np.frombuffer(hashlib.shake_256(name.encode()).digest(int(np.prod(shape))), np.uint8)
    if len(shape) == 1:
        return ((raw // 4 + np.float32(96)) / 128 if "norm" in name else raw / np.float32(256) - 0.5).reshape(shape)
    amplitude = 2.0 if "embed" in name else 1.0 if "lm_head" in name else 0.5 / np.sqrt(shape[-1])
    return ((2.0 * raw.astype(np.float32) - 255.0) * np.float32(amplitude / 256)).reshape(shape)


def tokenizer():
    """A byte-level tokenizer without merges: one token per byte (its letters are those of GPT-2's table of bytes)."""
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


def write_torchvision(folder):
    """Write a minimal torchvision for vLLM's import of Qwen3.5, because its wheels do not load with torch+cpu."""
    modes = "NEAREST = NEAREST_EXACT = BOX = BILINEAR = HAMMING = BICUBIC = LANCZOS = None"
    files = {
        "__init__": '__version__ = "0.28.0"', "io/__init__": "ImageReadMode = decode_image = None",
        "transforms/__init__": f"class InterpolationMode:\n    {modes}",
        "transforms/functional": "pil_to_tensor = None", "transforms/v2/__init__": "", "transforms/v2/functional": "",
    }  # fmt: skip
    for name, text in files.items():
        file = folder / "torchvision" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def write_tokenizer(folder):
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 40960}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_eagle3(folder):
    """Write an EAGLE3 head for the tiny Qwen3 in the format of vLLM's llama_eagle3.py; its proposals are random."""
    import torch
    from safetensors.torch import save_file

    matrices = {"q": (128, 2), "k": (64, 2), "v": (64, 2), "o": (HIDDEN, 2)}  # rows, columns in hidden sizes
    shapes = {f"midlayer.self_attn.{name}_proj.weight": (rows, n * HIDDEN) for name, (rows, n) in matrices.items()}
    shapes |= {f"midlayer.mlp.{name}_proj.weight": (2 * WIDTH, HIDDEN) for name in ("gate", "up")}
    shapes |= {"midlayer.mlp.down_proj.weight": (HIDDEN, 2 * WIDTH), "fc.weight": (HIDDEN, 3 * HIDDEN)}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    shapes |= {"lm_head.weight": (VOCAB, HIDDEN), **{f"{name}.weight": (HIDDEN,) for name in norms}}
    folder.mkdir()
    tensors = {name: torch.from_numpy(values(name, shape)).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "head_dim": 32}
    layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config = {**COMMON, **own, "draft_vocab_size": VOCAB, "eagle_config": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(folder, family):
    """Write the checkpoint of a family of CONFIGS into `folder` and return it."""
    import torch
    import transformers

    config = CONFIGS[family]
    (architecture,) = config["architectures"]
    model = getattr(transformers, architecture)(transformers.AutoConfig.for_model(**config)).to(torch.bfloat16)
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.from_numpy(values(name, tuple(tensor.shape))))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    return write_tokenizer(folder)


def pack_experts(folder, reference):
    """Store the experts of a checkpoint in MXFP4, and write it as bfloat16 with the same values into `reference`."""
    import torch
    from safetensors.torch import load_file, save_file

    from spark_mxfp4.mxfp4 import dequantize, quantize

    shutil.copytree(folder, reference)
    packed = load_file(folder / "model.safetensors")
    dense = dict(packed)
    for name in [name for name in packed if ".experts." in name]:
        blocks, scales = quantize(packed[name].float())
        packed[name], packed[f"{name}_scale"] = blocks.flatten(1), scales
        dense[name] = dequantize(blocks, scales, torch.bfloat16)
    for target, tensors in ((folder, packed), (reference, dense)):
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
