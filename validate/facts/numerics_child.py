"""Computes a small MXFP4 mixture-of-experts (MoE) layer with the server's kernel, in its interpreter, and judges it.

`python -P numerics_child.py REQUEST ANSWERS` with REQUEST = JSON {"way": "plugin" or "vllm", "model": DIR or null,
"serve_args": [...], "gpu_fields": [...] of nvidia-smi}; each fact is one JSON line in ANSWERS. It needs only the
standard library, torch and the judged packages. The float64 reference follows the format's specification and shares no
code with any kernel.
"""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Sizes that every kernel takes without padding: FlashInfer's tiles are 128 wide (docs/hardware.md).
HIDDEN = INTERMEDIATE = 128
EXPERTS, TOP_K, TOKENS, BLOCK = 4, 2, 16, 32
ALPHA, LIMIT = 1.702, 7.0  # openai/gpt-oss: swiglu(x, alpha=1.702, limit=7.0)
# E2M1 values by their four bits; the highest bit is the sign (OCP Microscaling Formats v1.0, section 5.3.3).
ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Largest relative RMS difference that rounding explains. bfloat16 input and output: 0.3 % measured on a CPU. MXFP8
# activations (E4M3, one scale per 32) are rounded twice to 3 bits, each time by at most 2^-4: about 4 % RMS by
# calculation, not measured on a Spark. A wrong nibble order gives 140 %, a scale off by one 70 %, a lost clamp 40 %.
TOLERANCE = {"bf16": 0.02, "mxfp8": 0.10}

PROBED_BYTES = 1 << 29  # of CUDA memory
# A container's view of its own memory cgroup, in version 2 and 1; a machine's root cgroup has no such file.
USAGE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
LOAD_SECONDS, SMI_SECONDS = 1.5, 5.0  # utilization.gpu covers at most the last second
EAGER = "cuda, eager"  # a GPU with a kernel without CUDA graphs; the plugin refuses such a kernel if graphs are on


class MoeLayer(NamedTuple):
    """A gpt-oss layer's experts on the CPU, packed as in the checkpoint, with an input and its routing.

    Blocks are u8 [E, rows, columns / 2], scales u8 [E, rows, columns / 32], biases bfloat16 [E, rows]; gate and up rows
    are interleaved. x is bfloat16 [T, H], logits float32 [T, E].
    """

    gate_up: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    x: torch.Tensor
    logits: torch.Tensor

    def routing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights (float32 [T, k], softmax over the chosen) and ids (int32 [T, k]) of the best experts."""
        best, ids = self.logits.topk(TOP_K)
        return best.softmax(-1), ids.to(torch.int32)


def make_layer() -> MoeLayer:
    """Return a layer that is the same on every machine; a tenth of its gates are above the clamp's limit."""
    random = torch.Generator().manual_seed(20261121)

    def projection(rows: int, columns: int, scale: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Blocks u8 [E, rows, columns / 2], E8M0 scales from `scale` to `scale` + 2, bias bf16 [E, rows]."""
        blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=random, dtype=torch.uint8)
        steps = torch.randint(0, 3, (EXPERTS, rows, columns // BLOCK), generator=random, dtype=torch.uint8)
        return blocks, steps + scale, 4 * torch.randn(EXPERTS, rows, generator=random).to(torch.bfloat16)

    gate_up, down = projection(2 * INTERMEDIATE, HIDDEN, 123), projection(HIDDEN, INTERMEDIATE, 120)
    x = torch.randn(TOKENS, HIDDEN, generator=random).to(torch.bfloat16)
    return MoeLayer(gate_up, down, x, torch.randn(TOKENS, EXPERTS, generator=random))


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values [..., columns] in float64: the low nibble first, times 2^(scale - 127) for each block of 32."""
    elements = torch.tensor(ELEMENTS, dtype=torch.float64)
    pairs = torch.stack([elements.repeat(16), elements.repeat_interleave(16)], dim=-1)  # of each byte
    values = pairs[blocks.int()].view(*scales.shape, BLOCK)
    return values.mul_(torch.exp2(scales.double() - 127)[..., None]).flatten(-2)


def reference(layer: MoeLayer) -> torch.Tensor:
    """Return the layer's output, float64 [T, H], computed one token and one expert at a time."""
    weights, ids = layer.routing()
    gate_up, down = (unpack(blocks, scales) for blocks, scales, _ in (layer.gate_up, layer.down))
    result = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            projected = gate_up[expert] @ layer.x[token].double() + layer.gate_up[2][expert].double()
            gate, up = projected[0::2].clamp(max=LIMIT), projected[1::2].clamp(-LIMIT, LIMIT)
            hidden = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
            result[token] += weight * (down[expert] @ hidden + layer.down[2][expert].double())
    return result


class Run(NamedTuple):
    """A kernel ready to run: its name, its format of activations (a key of TOLERANCE), its device (or EAGER), a call.

    `call` returns the layer's output [T, H].
    """

    kernel: str
    activations: str
    device: str
    call: Callable[[], torch.Tensor]


def by_plugin(layer: MoeLayer, _request: dict[str, Any]) -> Run:
    """Return the kernel that our vLLM plugin would run here, with the plugin's padding and the kernel's own layout."""
    from spark_mxfp4.experts import ExpertWeights, Projection  # noqa: PLC0415 - only what is judged is imported
    from spark_mxfp4.registry import chosen_name, load  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = load(chosen_name(device))
    hidden, intermediate = kernel.padded(HIDDEN, INTERMEDIATE)

    def moved(projection: tuple[torch.Tensor, ...], rows: int, columns: int) -> Projection:
        """The projection padded with zeros, as the plugin's create_weights and vLLM's loader leave it."""
        parts = []
        for part, shape in zip(projection, ((rows, columns // 2), (rows, columns // BLOCK), (rows,)), strict=True):
            padded = torch.zeros(EXPERTS, *shape, dtype=part.dtype, device=device)
            padded[tuple(map(slice, part.shape))] = part.to(device)
            parts.append(padded)
        return Projection(*parts)

    loaded = ExpertWeights(moved(layer.gate_up, 2 * intermediate, hidden), moved(layer.down, hidden, intermediate))
    prepared = kernel.prepare(loaded)
    x = torch.zeros(TOKENS, hidden, dtype=torch.bfloat16, device=device)
    x[:, :HIDDEN] = layer.x.to(device)
    topk, ids = (part.to(device) for part in layer.routing())
    name = kernel.name if kernel.variant(prepared) == kernel.name else f"{kernel.name} ({kernel.variant(prepared)})"
    where = device if device == "cpu" or kernel.cuda_graphs else EAGER
    return Run(f"spark_mxfp4 {name}", "bf16", where, lambda: kernel.run(x, prepared, ids, topk)[:, :HIDDEN])


def by_vllm(layer: MoeLayer, request: dict[str, Any]) -> Run:
    """Return the layer as vLLM 0.32.0 would run it, with its choice of backend, weight conversion and kernel."""
    from vllm.config import set_current_vllm_config  # noqa: PLC0415 - only what is judged is imported
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod  # noqa: PLC0415
    from vllm.v1.worker.workspace import init_workspace_manager  # noqa: PLC0415

    # Our packages may not be installed here. This folder comes last in the path, so that it hides no package.
    sys.path.append(str(Path(__file__).parent))
    child = importlib.import_module("deep_child")
    questions = child.Questions(request["model"], request["serve_args"], request["layer"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with set_current_vllm_config(questions.config):
        init_workspace_manager(device)
        sizes = {"hidden_dim": HIDDEN, "hidden_dim_unpadded": HIDDEN, "intermediate_size": INTERMEDIATE}
        sizes |= {"intermediate_size_per_partition_unpadded": INTERMEDIATE, "experts_per_token": TOP_K}
        counts = dict.fromkeys(("num_experts", "num_local_experts", "num_logical_experts"), EXPERTS)
        method = GptOssMxfp4MoEMethod(replace(questions.moe_config(), device=device, **sizes, **counts))
        holder = _holder(method, layer, device)
        method.process_weights_after_loading(holder)
    name = str(method.mxfp4_backend.name)
    activations = "mxfp8" if name.endswith("MXFP8") else "bf16"
    return Run(name, activations, device.type, _vllm_call(method, holder, layer, device, questions.config))


def _vllm_call(
    method: Any, holder: Any, layer: MoeLayer, device: torch.device, config: Any
) -> Callable[[], torch.Tensor]:
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.forward_context import set_forward_context  # noqa: PLC0415

    padded = torch.zeros(TOKENS, holder.hidden, dtype=torch.bfloat16, device=device)
    padded[:, :HIDDEN] = layer.x.to(device)
    logits = layer.logits.to(device)
    topk, ids = (part.to(device) for part in layer.routing())

    def call() -> torch.Tensor:
        with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=TOKENS):
            if method.is_monolithic:
                out = method.apply_monolithic(holder, padded, logits)
            else:
                out = method.apply(holder, padded, topk, ids, None, None)
        cut: torch.Tensor = out[:, :HIDDEN]
        return cut

    return call


class Holder(torch.nn.Module):
    """Replaces vLLM's RoutedExperts: has the attributes that its MXFP4 method reads of a layer, on one device."""

    expert_map = num_expert_group = topk_group = e_score_correction_bias = routing_sink = None
    apply_router_weight_on_input = False
    routed_scaling_factor = 1.0
    global_num_experts = local_num_experts = EXPERTS
    ep_rank = 0

    def __init__(self, activation: Any, hidden: int) -> None:
        super().__init__()
        self.activation, self.hidden = activation, hidden

    def _expert_routing_tables(self) -> None:
        return None


def _holder(method: Any, layer: MoeLayer, device: torch.device) -> Holder:
    """Return a layer with vLLM's parameters, padded as its backend requires and filled with our weights."""
    config = method.moe
    hidden, intermediate = method.maybe_roundup_sizes(HIDDEN, INTERMEDIATE, torch.bfloat16, config.moe_parallel_config)
    config.hidden_dim, config.intermediate_size_per_partition = hidden, intermediate
    holder = Holder(config.activation, hidden)
    method.create_weights(holder, EXPERTS, hidden, intermediate, torch.bfloat16)
    for name, projection in (("w13", layer.gate_up), ("w2", layer.down)):
        for suffix, part in zip(("_weight", "_weight_scale", "_bias"), projection, strict=True):
            parameter = getattr(holder, name + suffix)
            filled = torch.zeros_like(parameter, device=device)
            filled[tuple(slice(size) for size in part.shape)] = part.to(device)
            parameter.data = filled
    return holder


def difference(output: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the root mean square of the difference, relative to the root mean square of `wanted`."""
    return float((output.double() - wanted.to(output.device)).norm() / wanted.norm())


def graph_difference(run: Run, eager: torch.Tensor) -> float | None:
    """Return the largest difference between `eager` and a CUDA graph's replay; None without a GPU or a graph."""
    if run.device != "cuda":
        return None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up on another than the default stream, as torch.cuda.graph requires
        run.call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run.call()
    captured.fill_(float("nan"))  # elements that the replay does not write stay NaN
    graph.replay()
    torch.cuda.synchronize()
    return float((captured.float() - eager.float()).abs().max())


def loaded_state(fields: list[str]) -> dict[str, str] | None:
    """Return nvidia-smi's state of the GPU after LOAD_SECONDS of matrix products; None without a GPU or an answer.

    An idle GPU lowers its clock, so a low clock is a fault only under load.
    """
    if not torch.cuda.is_available():
        return None
    square = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    query: subprocess.Popen[str] | None = None
    started = time.monotonic()
    while (passed := time.monotonic() - started) < LOAD_SECONDS + SMI_SECONDS:
        for _ in range(8):
            torch.mm(square, square)
        torch.cuda.synchronize()
        if query is None and passed >= LOAD_SECONDS:
            command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
            try:
                query = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            except OSError:
                return None
        if query is not None and query.poll() is not None:
            break
    if query is None or query.poll() is None:  # nvidia-smi hangs, as with a broken driver
        return None
    lines = query.communicate()[0].splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else None


def charged() -> float | None:
    """Return the share of CUDA memory that this container's cgroup counts; None without a GPU or a readable cgroup."""
    file = next((path for path in map(Path, USAGE) if path.is_file()), None)
    if file is None or not torch.cuda.is_available():
        return None
    before = int(file.read_text(encoding="ascii"))
    probed = torch.ones(PROBED_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    after = int(file.read_text(encoding="ascii"))
    del probed
    return (after - before) / PROBED_BYTES


WAYS = {"plugin": by_plugin, "vllm": by_vllm}


def main(request: str, answers: str) -> None:
    """Run the layer and write each fact at once, so that a later crash loses no earlier fact."""
    arguments = json.loads(request)

    def write(name: str, value: Any) -> None:
        """Append a line and close the file, so that a later crash does not lose the line."""
        with Path(answers).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": f"numerics.{name}", "value": value}) + "\n")

    layer = make_layer()
    run = WAYS[arguments["way"]](layer, arguments)
    write("kernel", run.kernel)
    write("device", run.device)
    write("tolerance", TOLERANCE[run.activations])
    out = run.call()
    write("difference", difference(out, reference(layer)))
    write("graph_difference", graph_difference(run, out.clone()))
    write("charged", charged())
    write("loaded", loaded_state(arguments["gpu_fields"]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
