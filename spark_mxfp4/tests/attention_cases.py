"""Random attention layers with poisoned memory, checked against float32, for the CPU build and for GPUs."""

import torch

from spark_mxfp4.kernels import attention, norm
from spark_mxfp4.kernels.attention import Cache, Layer, Projections

SCALE = 0.125
MOST_ERROR = 0.01  # of values of about 1: probabilities and outputs are bf16


def random_cache(lengths, new_tokens, key_heads, block, device):
    """Return a cache with the sequences' earlier tokens in scattered blocks, else NaN; heads before or after tokens."""
    longest = max(1, *lengths)
    table_width = -(-longest // block)
    blocks = len(lengths) * table_width + 3
    data = torch.full((blocks, key_heads, block, 128), torch.nan, dtype=torch.bfloat16, device=device)
    if block % 32 == 0:  # vLLM's other layout
        data = data.transpose(1, 2).contiguous().transpose(1, 2)
    table = torch.randperm(blocks)[: len(lengths) * table_width].reshape(len(lengths), table_width).int().to(device)
    slots = []
    for row, (length, new) in enumerate(zip(lengths, new_tokens, strict=True)):
        blocks_of_row = table[row].tolist()
        places = [blocks_of_row[p // block] * block + p % block for p in range(length)]
        cached = torch.tensor(places[: max(0, length - new)], dtype=torch.long, device=device)
        data[cached // block, :, cached % block] = torch.randn(len(cached), key_heads, 128, device=device).bfloat16()
        slots += places[length - new :] if length else [-1]
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Cache(data, table, held, torch.tensor(slots, device=device))


def projections(tokens, key_heads, device, group=8):
    product = torch.randn(tokens, 64 * (group + 2) * key_heads, device=device).bfloat16()
    parts = product.split([64 * group * key_heads, 64 * key_heads, 64 * key_heads], dim=-1)
    return Projections(*(part.view(tokens, -1, 64) for part in parts))


def rotations(positions, device):
    return torch.randn(positions, 64, device=device)


def clone(cache):
    data = torch.empty_strided(cache.data.shape, cache.data.stride(), dtype=cache.data.dtype, device=cache.data.device)
    return cache._replace(data=data.copy_(cache.data))


def longer(tensor):
    """Return the rows and one more, because vLLM's tensors have room for more sequences."""
    return torch.cat([tensor, tensor[:1]])


def check_attention(
    lengths, window, shared_by, device, *, key_heads=1, group=8, block=16, sinks=False, rotated=False, least=2,
    scale=SCALE, stored=True,
):  # fmt: skip
    """Compare one launch with float32: outputs, the cache bit for bit, and the counters.

    With a `scale` of 8 some scores differ by more than float32's largest exponent. Without `stored`, slots are
    negative.
    """
    new = [min(1, length) for length in lengths]
    cache = random_cache(lengths, new, key_heads, block, device)
    projected = projections(len(lengths), key_heads, device, group)
    drawn = torch.randn(group * key_heads, device=device).bfloat16() if sinks else None
    rotation = rotations(max(lengths) + 1, device) if rotated else None
    layer = Layer(scale, attention.counters(key_heads, device), window, drawn, rotation)
    expected_cache = clone(cache)
    expected = attention.reference(projected, expected_cache, layer)
    output = torch.full((len(expected) + 1, *expected.shape[1:]), torch.nan, dtype=torch.bfloat16, device=device)
    if not stored:
        expected_cache = clone(cache)
        cache = cache._replace(slots=torch.full_like(cache.slots, -1))
    padded = cache._replace(**{name: longer(getattr(cache, name)) for name in ("table", "lengths", "slots")})
    attention.attend(projected, padded, layer, output, shared_by=shared_by, least=least)
    torch.testing.assert_close(output[:-1].float(), expected, rtol=MOST_ERROR, atol=MOST_ERROR)
    assert output[-1].isnan().all()
    assert torch.equal(cache.data.view(torch.int16), expected_cache.data.view(torch.int16))
    assert not layer.tickets.any()


def check_rotation(sequences, device, key_heads=2, block=16):
    """Compare a prompt's queries and cache with torch, bit for bit. `sequences` has each one's new and total tokens.

    The second token is not stored.
    """
    new, lengths = map(list, zip(*sequences, strict=True))
    cache = random_cache(lengths, new, key_heads, block, device)
    projected = projections(sum(new), key_heads, device)
    query, key, value = projected
    rotation = rotations(max(lengths), device)
    positions = torch.cat([torch.arange(length - count, length) for count, length in sequences]).to(device)
    starts = torch.tensor([0, *new], device=device).cumsum(0).int()
    cache.slots[1] = -1
    expected = clone(cache)
    for token, slot in enumerate(cache.slots.tolist()):
        if slot < 0:
            continue
        row = torch.cat([attention.rotated(key, rotation, positions)[token], value[token]], dim=-1)
        expected.data[slot // block, :, slot % block] = row
    expected_query = attention.rotated(query, rotation, positions)
    assert torch.equal(attention.rotate_and_store(projected, cache, starts, rotation), expected_query)
    assert torch.equal(cache.data.view(torch.int16), expected.data.view(torch.int16))


def check_norm(tokens, columns, device, scale=1):
    """Compare the norm and the sum with torch, the sum bit for bit. With a `scale` of 0.003 the epsilon matters."""
    x, residual = ((torch.randn(tokens, columns, device=device) * scale).bfloat16() for _ in range(2))
    weight = torch.randn(columns, device=device).bfloat16()
    expected, expected_sum = norm.reference(x, residual, weight, 1e-5)
    output, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(output, expected, rtol=0.016, atol=1e-3)  # two steps of bf16: two roundings
    assert (output != expected).sum() <= 0.02 * expected.numel()  # elements where rsqrt rounds differently
    assert torch.equal(total, expected_sum)
