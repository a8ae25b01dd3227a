"""The mixture of experts in CUDA C++, for compute capability 9.0 (Hopper) and 12.1 (GB10).

Up to 32 pairs of token and expert take one launch (layer.cuh). More pairs take two launches; the first sorts them
(rows.cuh). Compute capability 12.1 never takes more. On 9.0 larger batches take four launches: sort, first product with
bias and activation, second product with bias (gemm.cuh), weighted sum. For many tokens a fifth launch writes the
activations in the order of the sorted pairs. The host never waits for the device, so CUDA graphs can capture the
launches. The same inputs give the same bits. `prepare` lays weights out once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from spark_mxfp4.experts import GPT_OSS, Activation, ExpertWeights, Projection, TopK
from spark_mxfp4.kernel import MoeKernel
from spark_mxfp4.kernels import extension, precompile, search, tuning
from spark_mxfp4.kernels.layout import CHUNK_BYTES, COLUMNS, ROWS, pack, unpack

# Compute capability → the library of `precompile` and its target. LAYER has only the kernels of a whole layer.
LIBRARIES = {(9, 0): (precompile.HOPPER, "90a"), (12, 1): (precompile.LAYER, "121a")}
MUCH_SHARED = 232_448  # bytes of shared memory that a block needs for the shapes LARGE_LAYERS
ROW_MULTIPLE = 8  # each expert's rows in planes begin at a multiple of the swizzle's period (routing.cuh)
SLACK_ROWS = 256  # copies may read this many rows beyond the last: the widest tile
MAX_EXPERTS, MAX_TOP_K = 512, 16
FEW_PAIRS = 32  # the most pairs that layer.cuh sorts itself
MOST_CHUNKS_OF_A_PART = 24  # of 64 columns each; dividing so few into two parts costs more than it saves
VECTOR_BYTES = 16  # size and alignment of a thread's loads of x
POINTER, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
FUNCTIONS = {
    "spark_sort": (POINTER, POINTER, INT, POINTER),
    "spark_planes": (POINTER, POINTER, LONG, POINTER),
    "spark_gemm": (POINTER, INT, INT, INT, POINTER),
    "spark_layer": (POINTER, INT, INT, POINTER),
    "spark_reduce": (POINTER, POINTER, POINTER, POINTER, INT, INT, INT, POINTER),
}

Routing, Ordering, Gemm, Input = map(extension.structure, ("Routing", "Ordering", "Gemm", "Input"))
Layer = extension.structure("Layer", Gemm, Routing, Input)
# Kernel shapes by number, for one product and for a whole layer; SMALL_LAYERS fit compute capability 12.1.
GROUPED, SMALL_LAYERS = precompile.shapes("GROUPED"), precompile.shapes("SMALL_LAYERS")
LAYERS = {**SMALL_LAYERS, **precompile.shapes("LARGE_LAYERS")}


class HopperKernel(MoeKernel):
    """The CUDA C++ kernels, for weights that `prepare` has laid out."""

    activations = True

    @staticmethod
    def available(device: torch.device) -> bool:
        """Tell whether the kernels for `device` are built or can be built."""
        build = LIBRARIES.get(torch.cuda.get_device_capability(device))
        if torch.version.hip is not None or build is None:
            return False  # AMD's gfx90a reports 9.0 too
        return extension.available(*build)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Return `weights` (packed MXFP4 on the GPU) in the kernel's layout, and build the kernels if needed.

        Raises NotImplementedError if there are no kernels for the device, and ValueError for weights that are not
        packed.
        """
        device = weights.down.weight.device
        if device.type != "cuda" or torch.cuda.get_device_capability(device) not in LIBRARIES:
            raise NotImplementedError(
                f"kernel 'hopper' cannot run on {device} · it is built for compute capability 9.0 and 12.1 · "
                "set SPARK_MXFP4_KERNEL=triton"
            )
        library()
        return pack(weights)

    def tune(self, prepared: ExpertWeights) -> None:
        """Choose the products' shapes for layers of these sizes, as `search` describes; see MoeKernel."""
        if not has_products(prepared.down.weight.device):
            return

        def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, shapes: tuning.Pair) -> torch.Tensor:
            return grouped_layer(x, prepared, TopK(ids, shares), shapes)

        widths = [shape.tokens for shape in GROUPED.values()]
        search.tune(prepared.down.weight.device, sizes(prepared), widths, layer)

    def restore(self, prepared: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
        """Undo `prepare`: the checkpoint's bytes, biases in bfloat16."""
        plain = unpack(prepared, hidden, intermediate)
        return ExpertWeights(*(p._replace(bias=None if p.bias is None else p.bias.bfloat16()) for p in plain))

    def variant(self, prepared: ExpertWeights) -> str:
        """Return "layer" on devices that only have layer.cuh's kernel, else this kernel's name."""
        device = prepared.down.weight.device
        return self.name if device.type != "cuda" or has_products(device) else "layer"

    def run(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        activation: Activation = GPT_OSS,
    ) -> torch.Tensor:
        """Return the weighted sum [T, H] of the experts' outputs for bf16 `x` [T, H]; see `experts.moe`.

        `weights` come from `prepare`; `topk_ids` is int32 or int64 [T, k], at most 16 wide.
        Raises ValueError for other dtypes, shapes and weights.
        """
        _check(x, weights, topk_ids)
        if topk_ids.numel() == 0:
            return torch.empty_like(x)
        chosen = TopK(topk_ids, topk_weights, expert_map)
        if has_products(x.device):
            shapes = tuning.shapes(torch.cuda.get_device_name(x.device), topk_ids.numel(), sizes(weights))
            if shapes is not None:
                return grouped_layer(x, weights, chosen, shapes, activation)
        return whole_layer(x, weights, chosen, activation=activation)


def has_products(device: torch.device) -> bool:
    """Tell whether `device` has the kernels for single products, which need Hopper's matrix instruction."""
    return LIBRARIES[torch.cuda.get_device_capability(device)][0] == precompile.HOPPER


def sizes(prepared: ExpertWeights) -> tuning.LaidOut:
    """Return the sizes of a prepared layer, with its padding."""
    experts, row_tiles, chunks, _ = prepared.gate_up.weight.shape
    return tuning.LaidOut(experts, chunks * COLUMNS, row_tiles * ROWS // 2)


def grouped_layer(
    x: torch.Tensor,
    weights: ExpertWeights,
    chosen: TopK,
    shapes: tuning.Pair,
    activation: Activation = GPT_OSS,
) -> torch.Tensor:
    """Return `HopperKernel.run`'s result, with one launch per product; `shapes` are those of the two products."""
    gate_up, down = weights
    topk_ids, topk_weights, expert_map = chosen
    tokens, top_k = topk_ids.shape
    result = torch.empty_like(x)
    shares = topk_weights.to(torch.float32).contiguous()
    routed = Routed(x, weights, topk_ids, expert_map, min(GROUPED[shape].tokens for shape in shapes), ROW_MULTIPLE)
    row_tiles, chunks = gate_up.weight.shape[1:3]
    if GROUPED[shapes[0]].gathers:
        ordered = torch.empty(tokens, chunks * COLUMNS, dtype=x.dtype, device=x.device)
        routed.sort(ordered, chunks)
    else:
        ordered = routed.planes(chunks)
        routed.sort()
        routed.write_planes(ordered, chunks)
    hidden = routed.planes(row_tiles // 2)
    output = torch.empty(routed.rows, x.shape[1], dtype=x.dtype, device=x.device)
    routed.multiply(gate_up, ordered, hidden, shapes[0], activation)
    routed.multiply(down, hidden, output, shapes[1], None)
    pointers = (tensor.data_ptr() for tensor in (output, routed.row_of_pair, shares, result))
    extension.launch(library(), "spark_reduce", *pointers, tokens, top_k, x.shape[1], device=x.device)
    return result


def whole_layer(
    x: torch.Tensor,
    weights: ExpertWeights,
    chosen: TopK,
    plan: LayerPlan | None = None,
    activation: Activation = GPT_OSS,
) -> torch.Tensor:
    """Return `HopperKernel.run`'s result with one launch, after a launch that sorts if there are more than 32 pairs.

    The result is correct for any number of tokens, but the kernel is fast only for few, because every tile of 8 to 64
    tokens reads its expert's weights again. The default `plan` is that of `plan_layer`, or of `tuning.plan` if blocks
    have little shared memory.
    """
    gate_up, down = weights
    topk_ids, topk_weights, expert_map = chosen
    result = torch.empty_like(x)
    shares = topk_weights.to(torch.float32).contiguous()
    row_tiles, chunks = down.weight.shape[1:3]
    limits = torch.cuda.get_device_properties(x.device)
    processors, pairs = limits.multi_processor_count, topk_ids.numel()
    if plan is None and limits.shared_memory_per_block_optin < MUCH_SHARED:
        plan = LayerPlan(**tuning.plan(torch.cuda.get_device_name(x.device), pairs, len(down.weight)))
    plan = plan or plan_layer(pairs, gate_up.weight.shape[1], (row_tiles, chunks), processors)
    shape = LAYERS[plan.shape]
    routed = Routed(x, weights, topk_ids, expert_map, shape.tokens, 1)
    part_chunks = part_of(chunks, plan.parts, shape.chunks)
    parts = -(-chunks // part_chunks)
    sort = pairs > FEW_PAIRS
    if sort:
        routed.sort()
    hidden = torch.empty(routed.rows, chunks * COLUMNS, dtype=x.dtype, device=x.device)
    partial = torch.empty(routed.rows * parts * row_tiles * ROWS, dtype=torch.float32, device=x.device)
    taken = torch.empty(1, dtype=torch.int32, device=x.device)
    layer = Layer(
        routed.product(gate_up, routed.x, hidden, activation),
        routed.product(down, hidden, result, None), routed.routing(), _rows(routed.x), _rows(hidden),
        partial.data_ptr(), taken.data_ptr(), shares.data_ptr(), sort,
        parts, part_chunks, *topk_ids.shape, *plan.at_once,
    )  # fmt: skip
    extension.launch(library(), "spark_layer", layer, plan.shape, plan.processors or processors, device=x.device)
    return result


def _rows(x: torch.Tensor) -> ctypes.Structure:
    row_bytes = x.shape[1] * x.itemsize
    return Input(x.data_ptr(), row_bytes, row_bytes // VECTOR_BYTES)


class LayerPlan(NamedTuple):
    """How `whole_layer` divides its work: the kernel's shape (shapes.cuh), and `parts` of the second product's columns.

    `at_once` is the most stages of weights that a block has in flight, in the first and in the second product. With a
    low limit the second product delays the first less. `processors` is the number of multiprocessors to use, 0 for all.
    """

    shape: int  # of LAYERS
    parts: int
    at_once: tuple[int, int] = (2, 2)
    processors: int = 0


def plan_layer(pairs: int, first_row_tiles: int, second: tuple[int, int], processors: int) -> LayerPlan:
    """Return a plan for `pairs` of token and expert on a GPU with `processors` multiprocessors.

    `second` is the second product's number of row tiles, and of chunks of 64 columns. A work item has three tiles if
    each multiprocessor then gets one item, one tile if multiprocessors would otherwise be idle, else two. Few items are
    divided into two parts of the columns if there are enough columns. Measured on an H200, see performance.md.
    """
    row_tiles, chunks = second
    items, deep = pairs * -(-first_row_tiles // 3), chunks > MOST_CHUNKS_OF_A_PART
    if deep and 0.75 * processors <= items <= processors:
        return LayerPlan(3, 2, (3, 1))
    rows, most = (1, 3) if items < 1.9 * processors else (2, 6)
    return LayerPlan(rows, 2 if deep and pairs * -(-row_tiles // rows) < most * processors else 1)


def part_of(chunks: int, parts: int, step: int) -> int:
    """Return the chunks per part, a multiple of `step`, if `chunks` are divided into at most `parts` parts."""
    steps = -(-chunks // step)
    return -(-steps // parts) * step


class Routed:
    """One call's sorted rows on the device: the row of each pair, the token of each row, and the tiles."""

    def __init__(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        tokens_of_a_tile: int,
        row_multiple: int,
    ) -> None:
        self.x, self.ids = x.contiguous(), topk_ids.contiguous()
        if self.x.data_ptr() % VECTOR_BYTES:
            self.x = self.x.clone()
        self.map = None if expert_map is None else expert_map.to(torch.int32).contiguous()
        self.experts = weights.gate_up.weight.shape[0]
        self.tokens_of_a_tile, self.row_multiple = tokens_of_a_tile, row_multiple
        pairs, device = topk_ids.numel(), x.device
        spare = min(pairs, self.experts)
        self.rows = -(-(pairs + (row_multiple - 1) * spare) // row_multiple) * row_multiple
        self.row_of_pair = torch.empty(pairs, dtype=torch.int32, device=device)
        self.token_of_row = torch.empty(self.rows, dtype=torch.int32, device=device)
        self.tiles = torch.empty(spare + pairs // tokens_of_a_tile + 1, 4, dtype=torch.int32, device=device)
        self.tile_count = torch.empty(1, dtype=torch.int32, device=device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def sort(self, ordered: torch.Tensor | None = None, chunks: int = 0) -> None:
        """Sort the pairs by expert.

        If `ordered` [T, 64 · chunks] is given, write the tokens' activations there, in the first product's order of
        columns.
        """
        routing, ordering = self.routing(), self._ordering(ordered, chunks)
        extension.launch(library(), "spark_sort", routing, ordering, self.processors, device=self.x.device)

    def write_planes(self, planes: torch.Tensor, chunks: int) -> None:
        """Write the sorted rows' activations to `planes`, `chunks` planes of 64 columns."""
        routing, ordering = self.routing(), self._ordering(planes, chunks)
        extension.launch(library(), "spark_planes", ordering, routing, self.rows, device=self.x.device)

    def _ordering(self, ordered: torch.Tensor | None, chunks: int) -> ctypes.Structure:
        tokens, columns = self.x.shape
        vectors = columns * self.x.itemsize // VECTOR_BYTES
        return Ordering(self.x.data_ptr(), None if ordered is None else ordered.data_ptr(), tokens, vectors, chunks)

    def routing(self) -> ctypes.Structure:
        """Return the kernels' arguments for sorting."""
        return Routing(
            self.ids.data_ptr(), None if self.map is None else self.map.data_ptr(), self.ids.dtype == torch.int64,
            self.ids.numel(), self.ids.shape[1], self.experts, 0 if self.map is None else self.map.numel(),
            self.tokens_of_a_tile, self.row_multiple, self.row_of_pair.data_ptr(), self.token_of_row.data_ptr(),
            self.tiles.data_ptr(), self.tile_count.data_ptr(),
        )  # fmt: skip

    def multiply(
        self, projection: Projection, x: torch.Tensor, out: torch.Tensor, shape: int, activation: Activation | None
    ) -> None:
        """Run one grouped product from `x` to `out` with the shape of that number; see `product`."""
        gemm, first = self.product(projection, x, out, activation), int(activation is not None)
        extension.launch(library(), "spark_gemm", gemm, shape, first, self.processors, device=self.x.device)

    def planes(self, number: int) -> torch.Tensor:
        """Return an uninitialised buffer for `number` planes, each with 64 columns of all rows; see routing.cuh."""
        return torch.empty((number * self.rows + SLACK_ROWS) * COLUMNS, dtype=self.x.dtype, device=self.x.device)

    def product(
        self, projection: Projection, x: torch.Tensor, out: torch.Tensor, activation: Activation | None
    ) -> ctypes.Structure:
        """Return the kernels' arguments for a grouped product; only the first product has an activation.

        `x` is in planes. If the first product's shape gathers rows, `x` is instead the `ordered` that `sort` wrote.
        """
        weight, _, bias = projection
        if bias is None:
            raise ValueError(
                "the weights are not in this kernel's layout · they were not prepared · "
                "pass the result of HopperKernel.prepare"
            )
        return Gemm(
            weight.data_ptr(), bias.data_ptr(), x.data_ptr(), out.data_ptr(), self.token_of_row.data_ptr(),
            self.tiles.data_ptr(), self.tile_count.data_ptr(), weight.shape[2], weight.shape[1],
            0 if activation else out.shape[-1], self.rows, *(activation or GPT_OSS),
        )  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """Return the library of kernels for the current GPU; the first call builds it unless `precompile` has.

    Raises NotImplementedError if it is not built and there is no nvcc.
    """
    build = LIBRARIES[torch.cuda.get_device_capability()]
    return extension.bind(extension.library(*build, "kernel 'hopper'", "set SPARK_MXFP4_KERNEL=triton"), FUNCTIONS)


def _check(x: torch.Tensor, weights: ExpertWeights, topk_ids: torch.Tensor) -> None:
    gate_up, down = weights
    problems = {
        f"x is {x.dtype} {tuple(x.shape)}, not bfloat16 [T, H]": x.dtype != torch.bfloat16 or x.dim() != 2,
        "the weights are not in this kernel's layout": gate_up.weight.dim() != 4 or down.weight.dim() != 4,
        f"topk_ids are {topk_ids.dtype}": topk_ids.dtype not in (torch.int32, torch.int64),
        f"top-k is {topk_ids.shape[-1]}, more than {MAX_TOP_K}": topk_ids.shape[-1] > MAX_TOP_K,
        f"{down.weight.shape[0]} experts are more than {MAX_EXPERTS}": down.weight.shape[0] > MAX_EXPERTS,
    }
    if not any(problems.values()):
        problems = {
            "the sizes disagree": gate_up.weight.shape[1] // 2 != down.weight.shape[2]
            or not (gate_up.weight.shape[2] - 1) * COLUMNS < x.shape[1] <= down.weight.shape[1] * ROWS
            or gate_up.weight.shape[3] != CHUNK_BYTES
        }
    for problem, present in problems.items():
        if present:
            raise ValueError(
                f"kernel 'hopper' cannot run · {problem} · pass the result of HopperKernel.prepare and bf16 x"
            )
