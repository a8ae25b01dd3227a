"""Serves two gpt-oss layers with vLLM's engine, in the server's interpreter, and judges each part.

`python -P layers_child.py REQUEST ANSWERS` with REQUEST = JSON {"serve_args": [...], ...}; each fact is a JSON line in
ANSWERS. The engine gets the server's arguments and a checkpoint of random numbers with gpt-oss's heads, window and
sinks. It reads a prompt longer than the window, and decodes past the end of a cache block. The inputs and outputs of
each part are recorded. The outputs are compared with float64 results for the same inputs, so that an error belongs to
one part. This program needs only the standard library, torch, safetensors and vLLM.
"""

import importlib
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 64, 8, 64, 128  # of openai/gpt-oss-20b and -120b
LAYERS, EXPERTS, TOP_K, VOCABULARY = 2, 4, 2, 4096  # a sliding and a full layer; fewer experts and tokens than gpt-oss
SIZES = {"cuda": 2880, "cpu": 256}  # hidden and intermediate: gpt-oss's on a GPU, smaller on a CPU
PROMPT, STEPS = 254, 5  # tokens: decoding writes positions 254 to 257, and blocks of 16 to 128 end at 256
# Least gap between the last chosen and the next expert, relative to the largest logit: ten times bfloat16's rounding.
GAP = 0.03
ROWS = (0, 1, 15, 16, 127, 128, 129, 253, 254, 255, 256, 257)  # positions that are compared


def beside(name: str) -> ModuleType:
    """Return another program of this folder as a module, because our packages may not be installed here."""
    sys.path.append(str(Path(__file__).parent))  # at the end, so that its files hide no package
    return importlib.import_module(name)


Weights = dict[str, torch.Tensor]


def make_weights(size: int) -> Weights:
    """Return the checkpoint's tensors by name: heavy-tailed (t distribution), the same for every device of a kind.

    `size` is hidden and intermediate. Projections keep activations near 1, with outliers above 10. The tensors are on
    torch's default device.
    """
    random = torch.Generator(torch.get_default_device()).manual_seed(20261127)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=random)).to(torch.bfloat16)

    def heavy(*shape: int, scale: float = 1.0) -> torch.Tensor:
        # The root of chi-squared with 4 degrees of freedom over 4, quickly computed from two uniform numbers.
        chi = torch.rand(2, *shape, generator=random).log_().sum(0).mul_(-0.5).sqrt_()
        return torch.randn(shape, generator=random).mul_(scale).div_(chi).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": heavy(VOCABULARY, size), "model.norm.weight": 1 + normal(size, scale=0.1)}
    weights["lm_head.weight"] = heavy(VOCABULARY, size, scale=size**-0.5)
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": size}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input", "post_attention"):
            weights[f"{prefix}{name}_layernorm.weight"] = 1 + normal(size, scale=0.1)
        for name, count in rows.items():
            columns = HEADS * HEAD_DIM if name == "o" else size
            weights[f"{prefix}self_attn.{name}_proj.weight"] = heavy(count, columns, scale=columns**-0.5)
            weights[f"{prefix}self_attn.{name}_proj.bias"] = normal(count, scale=0.2)
        weights[f"{prefix}self_attn.sinks"] = normal(HEADS, scale=2.0)
        weights[f"{prefix}mlp.router.weight"] = heavy(EXPERTS, size, scale=size**-0.5)
        weights[f"{prefix}mlp.router.bias"] = normal(EXPERTS, scale=0.2)
        # E8M0 scales that make a product of `size` elements about as large as its input.
        scale = 125 - round(torch.tensor(float(size)).log2().item() / 2)
        for name, count in (("gate_up_proj", 2 * size), ("down_proj", size)):
            prefix_of_expert = f"{prefix}mlp.experts.{name}_"
            blocks = torch.randint(0, 256, (EXPERTS, count, size // 32, 16), generator=random, dtype=torch.uint8)
            steps = torch.randint(0, 3, (EXPERTS, count, size // 32), generator=random, dtype=torch.uint8)
            weights[prefix_of_expert + "blocks"], weights[prefix_of_expert + "scales"] = blocks, steps + scale
            weights[prefix_of_expert + "bias"] = normal(EXPERTS, count, scale=0.5)
    return weights


def write_checkpoint(folder: Path, weights: Weights, size: int) -> None:
    """Write config.json and the tensors."""
    from safetensors.torch import save_file  # noqa: PLC0415

    kinds = ["sliding_attention", "full_attention"]
    unconverted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16",
        "hidden_size": size, "intermediate_size": size, "num_hidden_layers": LAYERS, "layer_types": kinds,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "attention_bias": True,
        "sliding_window": WINDOW, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072, "initial_context_length": 4096, "rope_theta": 150000,
        "rope_scaling": {**rope, "original_max_position_embeddings": 4096}, "rms_norm_eps": 1e-05, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "eos_token_id": 0, "pad_token_id": 1,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": unconverted},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    on_cpu = {name: tensor.cpu() for name, tensor in weights.items()}
    save_file(on_cpu, folder / "model.safetensors", metadata={"format": "pt"})


def make_engine(folder: Path, serve_args: list[str]) -> Any:
    """Return vLLM's engine in this process, with the server's arguments except for sizes.

    It runs eagerly, so that a part's input and output can be recorded. The kernels are the same as in CUDA graphs.
    """
    deep = beside("deep_child")
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

    parser = deep.server_options().make_arg_parser(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args([*serve_args, "--model", str(folder)]))
    args.tokenizer = args.hf_config_path = args.speculative_config = None
    args.skip_tokenizer_init, args.enforce_eager, args.enable_prefix_caching = True, True, False
    args.disable_log_stats, args.load_format, args.generation_config = True, "auto", "vllm"
    args.max_model_len = args.max_num_batched_tokens = 1024
    args.max_num_seqs, args.tensor_parallel_size = 2, 1
    args.gpu_memory_utilization, args.kv_cache_memory_bytes = 0.05, 64 << 20
    return LLMEngine.from_engine_args(args)


Calls = dict[str, list[tuple[list[torch.Tensor], torch.Tensor]]]
PARTS = ("attn.attn", "attn.qkv_proj", "attn.o_proj", "mlp.router", "mlp.experts", "logits_processor")


def record(model: torch.nn.Module) -> tuple[Calls, torch.Tensor | None]:
    """Return part → its inputs and outputs at each later call, and the rotation of attention.

    The rotation has spark_mxfp4's cosines and sines, float32 [positions, HEAD_DIM]; None if attention does not rotate.
    """
    calls: Calls = defaultdict(list)
    rotation = None

    def hook(name: str) -> Callable[..., None]:
        def keep(_module: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            tensors = [value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor)]
            first = output[0] if isinstance(output, tuple) else output
            calls[name].append(([value.detach().clone() for value in tensors], first.detach().clone()))

        return keep

    for name, module in model.named_modules():
        if name.endswith(PARTS):
            module.register_forward_hook(hook(name), with_kwargs=True)
        if name.endswith("attn.attn"):
            rotation = getattr(getattr(module.impl, "layer", None), "rotation", None)
    return calls, None if rotation is None else rotation[: PROMPT + STEPS]


def serve(engine: Any) -> None:
    """Let the engine read the prompt and decode STEPS tokens."""
    from vllm import SamplingParams  # noqa: PLC0415

    prompt = torch.randint(2, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(7)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    engine.add_request("numbers", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int) -> torch.Tensor:
    """Return attention of the positions ROWS, float64 [rows, heads * HEAD_DIM]; `window` 0: no window.

    q, k and v are [positions, heads * HEAD_DIM], after the rotation.
    """
    q, k, v = (part.double().unflatten(-1, (-1, HEAD_DIM)) for part in (q, k, v))
    result = []
    for row in ROWS:
        first = max(0, row - window + 1) if window else 0
        keys, values = (part[first : row + 1].repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("hd,khd->hk", q[row], keys) * HEAD_DIM**-0.5
        weights = torch.cat([scores, sinks.double()[:, None]], dim=-1).softmax(-1)[:, :-1]
        result.append(torch.einsum("hk,khd->hd", weights, values).flatten())
    return torch.stack(result)


def rotate(x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    """Return x [positions, heads * HEAD_DIM], rotated in Neox style if attention does the rotation."""
    if rotation is None:
        return x
    low, high = x.double().unflatten(-1, (-1, HEAD_DIM)).chunk(2, dim=-1)
    cosines, sines = rotation[: len(x)].bfloat16().double()[:, None].chunk(2, dim=-1)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1).flatten(-2).bfloat16()


def shares(routes: torch.Tensor) -> torch.Tensor:
    """Return experts' shares, float64 [rows, EXPERTS], from logits [rows, EXPERTS] or spark_mxfp4's [2, rows, k]."""
    if routes.dim() == 2:
        best, ids = routes.double().topk(TOP_K)
        chosen = best.softmax(-1)
    else:
        chosen, ids = routes[0].double(), routes[1].view(torch.int32).long()
    return torch.zeros(len(chosen), EXPERTS, dtype=torch.float64).scatter(1, ids, chosen)


def project(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, columns] times the matrix `name`, plus its bias, float64."""
    return x.double() @ weights[f"{name}.weight"].double().T + weights[f"{name}.bias"].double()


def mix(numerics: ModuleType, weights: Weights, name: str, x: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Return the output of the experts `name` for x [rows, hidden] and their shares [rows, EXPERTS], float64."""
    result = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(EXPERTS):

        def times(projection: str, entering: torch.Tensor, expert: int = expert) -> torch.Tensor:
            blocks, scales, bias = (
                weights[f"{name}.{projection}_{part}"][expert] for part in ("blocks", "scales", "bias")
            )
            product: torch.Tensor = entering @ numerics.unpack(blocks.flatten(-2), scales).T + bias.double()
            return product

        projected = times("gate_up_proj", x.double())
        gate = projected[:, 0::2].clamp(max=numerics.LIMIT)
        up = projected[:, 1::2].clamp(-numerics.LIMIT, numerics.LIMIT)
        out = times("down_proj", (up + 1) * gate * torch.sigmoid(numerics.ALPHA * gate))
        result += parts[:, expert, None] * out
    return result


def judge(
    calls: Calls, rotation: torch.Tensor | None, weights: Weights, numerics: ModuleType
) -> Iterator[tuple[str, float]]:
    """Yield each part's name and its relative RMS difference from float64 at the positions ROWS."""
    rows = list(ROWS)

    def joined(name: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return a part's inputs and outputs of all calls, in the order of the positions: tokens are dimension -2."""
        inputs, outputs = zip(*calls[name], strict=True)
        return [torch.cat(parts, -2) for parts in zip(*inputs, strict=True)], torch.cat(outputs, -2)

    for layer in range(LAYERS):
        model, attn, mlp = f"model.layers.{layer}", f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        (x, *_), out = joined(f"{model}.attn.qkv_proj")
        wanted = torch.cat([project(weights, f"{attn}.{name}_proj", x[rows]) for name in "qkv"], dim=-1)
        yield f"qkv_proj {layer}", numerics.difference(out[rows], wanted)
        (q, k, v, *_), out = joined(f"{model}.attn.attn")
        kind, window = ("sliding", WINDOW) if layer % 2 == 0 else ("full", 0)
        wanted = attend(rotate(q, rotation), rotate(k, rotation), v, weights[f"{attn}.sinks"], window)
        read = sum(row < PROMPT for row in ROWS)
        yield f"attention {kind} prefill", numerics.difference(out[rows[:read]], wanted[:read])
        yield f"attention {kind} decode", numerics.difference(out[rows[read:]], wanted[read:])
        (x, *_), out = joined(f"{model}.attn.o_proj")
        yield f"o_proj {layer}", numerics.difference(out[rows], project(weights, f"{attn}.o_proj", x[rows]))
        (x, *_), routes = joined(f"{mlp}.router")
        logits = project(weights, f"{mlp}.router", x)
        # If the logits of two experts are almost equal, rounding may choose the other expert.
        order = (routes if routes.dim() == logits.dim() else logits).double().sort(descending=True).values
        clear = [row for row in rows if order[row, TOP_K - 1] - order[row, TOP_K] > GAP * order[row].abs().max()]
        parts = shares(routes)
        if routes.dim() == logits.dim():
            yield f"router {layer}", numerics.difference(routes[rows], logits[rows])
        else:
            yield f"router {layer}", numerics.difference(parts[clear], shares(logits)[clear])
        _, out = joined(f"{mlp}.experts")
        hidden = weights[f"{mlp}.router.weight"].shape[1]  # without vLLM's padding
        wanted = mix(numerics, weights, f"{mlp}.experts", x[clear, :hidden], parts[clear])
        yield f"experts {layer}", numerics.difference(out[clear, :hidden], wanted)
    (x, *_), logits = joined("logits_processor")
    yield "lm_head", numerics.difference(logits[:, :VOCABULARY], x.double() @ weights["lm_head.weight"].double().T)


def main(request: str, answers: str) -> None:
    """Serve the layers, judge each part, and write the differences."""
    arguments = json.loads(request)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model's parts are recorded in this process
    numerics = beside("numerics_child")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[device]
    with torch.device(device):
        weights = make_weights(size)
    with tempfile.TemporaryDirectory(prefix="sparkforge-layers-") as folder:
        write_checkpoint(Path(folder), weights, size)
        engine = make_engine(Path(folder), arguments["serve_args"])
        calls, rotation = engine.apply_model(record)[0]
        serve(engine)
    with torch.device(device):  # float64 there takes a tenth of the time
        differences = dict(judge(calls, rotation, weights, numerics))
    with Path(answers).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": "layers.differences", "value": differences}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
