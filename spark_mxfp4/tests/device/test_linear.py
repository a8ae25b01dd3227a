"""The dense products against float64 on fresh random matrices, with outputs poisoned, in graphs, and repeated."""

import pytest
import torch

from gpu import captured
from spark_mxfp4.kernels.check import PRODUCT_EDGES, PRODUCTS, error, poisoned
from spark_mxfp4.kernels.linear import MANY_ROWS, Format, Weight, dense, reference, run

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("compiled_kernels")]
SIZES = [*(size for size in PRODUCTS.values() if size[0] < MANY_ROWS), *PRODUCT_EDGES]


def matrix_of(rows, columns):
    matrix = torch.randn(rows, columns, device="cuda") * 0.05
    matrix[torch.rand_like(matrix) < 0.001] *= 30  # heavy tails
    return matrix


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize(("rows", "columns"), [*SIZES, (MANY_ROWS + 24, 2880), (MANY_ROWS, 1024)])
def test_products_are_right_and_repeat_to_the_bit(format_, rows, columns):
    matrix = matrix_of(rows, columns)
    weight, exact = Weight.pack(matrix, format_), reference(matrix, format_).double()
    bias = torch.randn(rows, device="cuda").bfloat16()
    for tokens in (1, 2, 7, 8, 9, 15, 16, 17, 24, 33, 64, 65, 200):
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        output = poisoned(run, x, weight, bias)
        assert error(output, x.double() @ exact.T + bias.double()) < 0.004, tokens
        assert torch.equal(output, poisoned(run, x, weight, bias))
        assert error(poisoned(run, x, weight), x.double() @ exact.T) < 0.004, tokens


@pytest.mark.parametrize("format_", Format)
def test_dense_is_the_quantised_matrix(format_):
    matrix = matrix_of(1003, 2080)
    exact = reference(matrix, format_)
    assert torch.equal(dense(Weight.pack(matrix, format_)), exact.bfloat16())


@pytest.mark.parametrize("format_", Format)
def test_a_graph_holds_a_chain_of_products(format_):
    """Each product reads the previous product's result, so a kernel that starts too early is noticed."""
    up, down = matrix_of(4096, 2880), matrix_of(2880, 4096)
    first, second = Weight.pack(up, format_), Weight.pack(down, format_)
    x = torch.randn(4, 2880, device="cuda").bfloat16()

    def chain():
        y = x
        for _ in range(6):
            y = run(run(y, first), second) / 200
        return y

    wanted = x.double()
    a, b = reference(up, format_).double(), reference(down, format_).double()
    for _ in range(6):
        wanted = ((wanted @ a.T).bfloat16().double() @ b.T).bfloat16().double() / 200
    graph, output = captured(chain)
    for _ in range(20):
        output.fill_(torch.nan)
        graph.replay()
        assert error(output, wanted) < 0.02


def test_rows_with_a_stride_are_taken():
    matrix = matrix_of(512, 1024)
    weight = Weight.pack(matrix, Format.MXFP4)
    wide = torch.randn(5, 3000, device="cuda").bfloat16()
    for start in (0, 8, 3):
        x = wide[:, start : start + 1024]
        assert error(run(x, weight), x.double() @ reference(matrix, Format.MXFP4).double().T) < 0.004


def test_compiled_by_torch():
    matrix = matrix_of(512, 1024)
    weight = Weight.pack(matrix, Format.FP8)
    x = torch.randn(3, 1024, device="cuda").bfloat16()
    compiled = torch.compile(lambda x: torch.nn.functional.silu(run(x, weight)), fullgraph=True)
    assert error(compiled(x), torch.nn.functional.silu(run(x, weight)).double()) < 0.004
