"""The attention and norm kernels against float32 on fresh random layers, with outputs poisoned, and in graphs."""

import pytest
import torch

import attention_cases
from gpu import captured
from spark_mxfp4.kernels import attention
from spark_mxfp4.kernels.attention import Layer

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("compiled_kernels")]
LENGTHS = [(1,), (16, 17), (127, 128, 129, 0), (1024,), (1, 5000, 333, 64), (3000,) * 16, (900,) * 64, (20_000,)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("key_heads", "group", "block"), [(8, 8, 16), (4, 8, 64), (2, 2, 48)])
def test_attention_is_that_of_float32(lengths, window, key_heads, group, block):
    for number, least in ((0, attention.LEAST_STEPS), (1, 1), (7, 1)):
        options = {"sinks": number != 1, "rotated": number != 7, "least": least}
        options |= {"key_heads": key_heads, "group": group, "block": block}
        attention_cases.check_attention(lengths, window, number, torch.device("cuda"), **options)


def test_a_prompt_is_rotated_and_cached():
    attention_cases.check_rotation([(9, 9), (300, 2000), (1, 65), (128, 130)], torch.device("cuda"), key_heads=8)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 2880), (64, 2880), (3000, 2880), (5, 64), (7, 12_288)])
def test_norm_equals_vllms(tokens, columns):
    attention_cases.check_norm(tokens, columns, torch.device("cuda"))


def test_a_cuda_graph_holds_many_layers():
    device = torch.device("cuda")
    lengths = [700, 70, 1300]
    layers = []
    for window in (0, 128) * 10:
        cache = attention_cases.random_cache(lengths, [1] * 3, 8, 16, device)
        output = torch.full((3, 64, 64), torch.nan, dtype=torch.bfloat16, device=device)
        layer = Layer(attention_cases.SCALE, attention.counters(8, device), window)
        layers.append((attention_cases.projections(3, 8, device), cache, layer, output))

    def run():
        for arguments in layers:
            attention.attend(*arguments)

    graph, _ = captured(run)
    for _ in range(3):
        for *_, output in layers:
            output.fill_(torch.nan)
        graph.replay()
        for *arguments, output in layers:
            expected = attention.reference(*arguments)
            torch.testing.assert_close(output.float(), expected, rtol=0, atol=3 * attention_cases.MOST_ERROR)
            assert not arguments[-1].tickets.any()
