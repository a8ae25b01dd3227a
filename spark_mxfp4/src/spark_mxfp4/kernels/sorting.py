"""Sort pairs of token and expert by expert, in Triton. No shape depends on the routing, so the host never waits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

SCAN = 1024  # pairs read in one step


class Blocks(NamedTuple):
    """Pairs in blocks of one expert each: `pairs` i32 [blocks · size] (the number of pairs stands for padding) and
    `experts` i32 [blocks], -1 for unused blocks."""  # noqa: D205, D209

    pairs: torch.Tensor
    experts: torch.Tensor
    size: int


def sort_into_blocks(
    topk_ids: torch.Tensor, num_experts: int, size: int, expert_map: torch.Tensor | None = None
) -> Blocks:
    """Sort the pairs of `topk_ids` (int [T, k]) by local expert, then by token, into blocks of `size`."""
    count, device = topk_ids.numel(), topk_ids.device
    blocks = min(count, num_experts) + count // size
    ids = topk_ids.contiguous()
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = torch.empty(blocks * size, dtype=torch.int32, device=device)
    experts = torch.empty(blocks, dtype=torch.int32, device=device)
    mapped = ids if expert_map is None else expert_map
    known = 0 if expert_map is None else expert_map.numel()
    count_pairs[(num_experts,)](ids, mapped, counts, count, known, SCAN=SCAN)
    padded_experts = triton.next_power_of_2(num_experts)
    place_pairs[(num_experts,)](
        ids, mapped, counts, pairs, experts, count, known, num_experts, blocks,
        SIZE=size, SCAN=SCAN, EXPERTS=padded_experts,
    )  # fmt: skip
    return Blocks(pairs, experts, size)


@triton.jit
def local_expert(
    ids_ptr: tl.tensor, map_ptr: tl.tensor, pair: tl.tensor, count: tl.tensor, known: tl.tensor
) -> tl.tensor:
    """Return the local experts (i32, -1 for none) of `pair` (below `count`), by a map of `known` experts."""
    ids = tl.load(ids_ptr + pair, mask=pair < count, other=-1).to(tl.int32)
    if known > 0:
        ids = tl.load(map_ptr + ids, mask=(ids >= 0) & (ids < known), other=-1).to(tl.int32)
    return ids


@triton.jit
def count_pairs(
    ids_ptr: tl.tensor, map_ptr: tl.tensor, counts_ptr: tl.tensor, count: tl.tensor, known: tl.tensor,
    SCAN: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Count the pairs of one local expert into `counts_ptr` i32 [experts]; for the rest see `local_expert`."""
    expert = tl.program_id(0)
    matches = tl.zeros((SCAN,), tl.int32)
    for first in range(0, count, SCAN):
        ids = local_expert(ids_ptr, map_ptr, first + tl.arange(0, SCAN), count, known)
        matches += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(matches))


@triton.jit
def place_pairs(  # noqa: PLR0913, PLR0917
    ids_ptr: tl.tensor, map_ptr: tl.tensor, counts_ptr: tl.tensor, pairs_ptr: tl.tensor, experts_ptr: tl.tensor,
    count: tl.tensor, known: tl.tensor, experts: tl.tensor, blocks: tl.tensor,
    SIZE: tl.constexpr, SCAN: tl.constexpr, EXPERTS: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Write one expert's blocks of SIZE pairs, as `Blocks` describes them, after those of the experts before it."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    needed = tl.cdiv(tl.load(counts_ptr + every, mask=every < experts, other=0), SIZE)
    first_block = tl.sum(tl.where(every < expert, needed, 0))
    pair_count = tl.load(counts_ptr + expert)
    begin = first_block * SIZE
    placed = 0
    for first in range(0, count, SCAN):
        pair = first + tl.arange(0, SCAN)
        matches = local_expert(ids_ptr, map_ptr, pair, count, known) == expert
        rank = tl.cumsum(matches.to(tl.int32), 0)
        tl.store(pairs_ptr + begin + placed + rank - 1, pair, mask=matches)
        placed += tl.sum(matches.to(tl.int32))
    padding = pair_count + tl.arange(0, SIZE)
    tl.store(
        pairs_ptr + begin + padding,
        tl.full((SIZE,), 0, tl.int32) + count,
        mask=padding < tl.cdiv(pair_count, SIZE) * SIZE,
    )
    last = tl.cdiv(pair_count, SIZE)
    for block in range(last):
        tl.store(experts_ptr + first_block + block, expert)
    if expert == experts - 1:
        for block in range(first_block + last, blocks):
            tl.store(experts_ptr + block, -1)
