"""The router for up to 16 tokens in one launch: product with bf16 weights, top-k, softmax over the chosen experts.

The kernels are in router.cu, for compute capability 9.0 and 12.x. Sums are float32, and logits are rounded to bfloat16
as in a bf16 linear layer. Experts are chosen as by vLLM's `topk_softmax` with renormalisation: of equal logits the
lowest index wins, and NaN counts as probability 0.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from spark_mxfp4.kernels import extension, precompile

MOST_TOKENS, MOST_EXPERTS, MOST_TOP_K = 16, 256, 8  # router.cuh
UNIT, TICKET_WARPS = 32, 12  # router.cuh: columns of a unit; router.cu: warps of a block
CLUSTERS = {0: (3072, 8), 1: (3072, 16), 2: (6144, 8)}  # variant: most columns, experts of a block
TICKETS = {3: 1, 4: 2, 5: 4, 6: 8}  # variant: units of a warp
LARGEST_CLUSTER = {9: 16, 12: 8}  # thread blocks, by major compute capability
POINTER, INT = ctypes.c_void_p, ctypes.c_int
FUNCTIONS = {"spark_router": (POINTER, INT, POINTER)}


class Routes(NamedTuple):
    """Each token's experts, int32 [M, k] (-1 for padding), and their shares, float32 [M, k], largest first."""

    ids: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def of(cls, table: torch.Tensor) -> Routes:
        """Return the routes in `table` (float32 [2, M, k]): shares, then the experts' numbers as int32 bits."""
        return cls(table[1].view(torch.int32), table[0])


def empty_table(tokens: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Return memory for the routes of `tokens` tokens: one tensor, because vLLM passes on only one."""
    return torch.empty(2, tokens, top_k, dtype=torch.float32, device=device)


Router = extension.structure("Router")


def fits(tokens: int, weight: torch.Tensor, top_k: int) -> bool:
    """Tell whether the kernels take `tokens` tokens and the router's weights [E, H]: dtype, sizes and device."""
    experts, columns = weight.shape
    return (
        0 < tokens <= MOST_TOKENS
        and top_k <= min(experts, MOST_TOP_K)
        and experts <= MOST_EXPERTS
        and columns % 8 == 0
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and extension.target(weight.device) is not None
    )


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    padding: torch.Tensor | None = None,
    variant: int | None = None,
) -> torch.Tensor:
    """Route bf16 `x` [M, H], M up to 16, by the router's bf16 `weight` [E, H] and `bias` [E]: see `Routes.of`.

    Tokens where `padding` (bool [M]) is true get expert -1 and share 0. `variant` overrides the choice of kernel.
    The host does not wait, so CUDA graphs can capture the call. Raises ValueError for other dtypes and sizes.
    """
    _check(x, weight, bias, top_k, padding)
    table = empty_table(x.shape[0], top_k, x.device)
    x = extension.aligned(x)
    library = load(x.device)
    major = torch.cuda.get_device_capability(x.device)[0]
    for number in variants(weight.shape[0], weight.shape[1], major) if variant is None else (variant,):
        parts = ticket = None
        if number in TICKETS:
            parts = torch.empty(slices(number, weight.shape[1]), x.shape[0], weight.shape[0], device=x.device)
            ticket = _ticket(x.device, weight.data_ptr())
        pointers = (weight, bias, x, padding, table[0], table[1], parts, ticket)
        job = Router(
            *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
            x.shape[0], *weight.shape, top_k, x.stride(0),
        )  # fmt: skip
        if extension.launch(library, "spark_router", job, number, device=x.device):
            return table
    raise ValueError(
        f"no kernel for a router of {weight.shape[0]} experts and {weight.shape[1]} columns · it is too large · "
        "use torch.nn.functional.linear and topk"
    )


def variants(experts: int, columns: int, major: int) -> tuple[int, ...]:
    """Return the variants of router.cu to try on a GPU of compute capability `major`.x, best first."""
    clusters = tuple(
        number
        for number, (most_columns, of_a_block) in CLUSTERS.items()
        if columns <= most_columns and -(-experts // of_a_block) <= LARGEST_CLUSTER.get(major, 0)
    )
    return (*clusters, *TICKETS)


def slices(variant: int, columns: int) -> int:
    """Return how many thread blocks of a variant with a ticket share the columns."""
    return -(-columns // (UNIT * TICKET_WARPS * TICKETS[variant]))


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, top_k: int, padding: torch.Tensor | None = None
) -> Routes:
    """Return the routes computed by torch, with sums in float32 and logits rounded to bfloat16."""
    logits = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    return choose(logits.bfloat16(), top_k, padding)


def choose(logits: torch.Tensor, top_k: int, padding: torch.Tensor | None = None) -> Routes:
    """Return each token's largest `top_k` of `logits` [M, E]; of equal logits the lowest index is first."""
    probabilities = torch.softmax(logits.float(), -1).nan_to_num(nan=0.0, posinf=0.0)
    largest, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    largest, ids = largest[:, :top_k], ids[:, :top_k].int()
    total = largest.sum(-1, keepdim=True)
    shares = largest / torch.where(total > 0, total, 1.0)
    if padding is not None:
        ids, shares = ids.masked_fill(padding[:, None], -1), shares.masked_fill(padding[:, None], 0.0)
    return Routes(ids, shares)


@cache
def _ticket(device: torch.device, _weight: int) -> torch.Tensor:
    """Return a counter that is 0 between launches; routers that may run at the same time need separate counters."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, top_k: int, padding: torch.Tensor | None
) -> None:
    problems = {
        f"x is {x.dtype} {tuple(x.shape)}, not bfloat16 [M, H]": x.dtype != torch.bfloat16
        or x.dim() != 2
        or x.shape[1] != weight.shape[1],
        f"bias is {None if bias is None else (bias.dtype, tuple(bias.shape))}, not bfloat16 [E]": bias is not None
        and (bias.dtype != torch.bfloat16 or tuple(bias.shape) != (weight.shape[0],)),
        "padding is not bool [M]": padding is not None
        and (padding.dtype != torch.bool or tuple(padding.shape) != (x.shape[0],) or not padding.is_contiguous()),
        f"{x.shape[0]} tokens, {weight.shape[0]} experts or top-{top_k} are too many": not fits(
            x.shape[0], weight, top_k
        ),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(
                f"the router's kernel cannot run · {problem} · use torch.nn.functional.linear and topk instead"
            )


@cache
def load(device: torch.device) -> ctypes.CDLL:
    """Return the kernels for `device`; without a library from `precompile`, the first call builds them.

    Raises NotImplementedError as `extension.library` does.
    """
    target = extension.target(device)
    path = extension.library(precompile.ROUTER, target, "the router's kernels", "set SPARK_MXFP4_ROUTER=vllm")
    return extension.bind(path, FUNCTIONS)
