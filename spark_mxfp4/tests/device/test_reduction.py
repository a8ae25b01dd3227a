"""The norm that adds the parts of two GPUs, against float32: eager, in graphs, with poisoned outputs."""

import pytest
import torch

from spark_mxfp4.kernels import extension, norm

pytestmark = pytest.mark.device
COLUMNS = 2880
DEVICES = [torch.device("cuda", index) for index in range(2)]


@pytest.fixture(scope="module")
def groups():
    """Two ranks in this process; torch enables access to another GPU's memory at the first copy between them."""
    if torch.cuda.device_count() < len(DEVICES) or not torch.cuda.can_device_access_peer(*DEVICES):
        pytest.skip("needs two GPUs that reach each other's memory")
    if extension.target(DEVICES[0]) is None:
        pytest.skip("the norms are not compiled for this GPU")
    for device, other in (DEVICES, DEVICES[::-1]):
        torch.ones(1, device=device).to(other)
    inboxes = [torch.zeros(norm.inbox_bytes(2, COLUMNS), dtype=torch.uint8, device=device) for device in DEVICES]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    buffers = [torch.zeros(norm.MOST_TOKENS, dtype=torch.int32, device=device) for device in DEVICES]
    yield [norm.Ranks(addresses.to(device), buffers[rank], rank) for rank, device in enumerate(DEVICES)]
    torch.cuda.synchronize(DEVICES[0])
    del inboxes


def layers(groups, rank, parts, residual, weight):
    """Run a chain of norms, each with the previous sum as residual; return the last output and sum."""
    device = DEVICES[rank]
    parts, residual, weight = parts[:, rank].to(device), residual.to(device), weight.to(device)

    def run():
        total = residual
        for part in parts:
            with torch.cuda.device(device):
                output, total = norm.reduce_add_rms_norm(part, total, weight, 1e-5, groups[rank])
        return output, total

    return run


def check(outputs, parts, residual, weight):
    total = residual
    for part in parts:
        expected, total = norm.reference(part.float().sum(0), total, weight, 1e-5)
    outputs = [[tensor.cpu() for tensor in pair] for pair in outputs]
    for output, sums in outputs:
        torch.testing.assert_close(output.float(), expected.float(), rtol=0.04, atol=0.02)
        torch.testing.assert_close(sums.float(), total.float(), rtol=0.02, atol=0.05)
    assert all(map(torch.equal, *outputs))  # the same bits on both GPUs


@pytest.mark.parametrize("tokens", [1, 3, 16, 64])
def test_two_gpus_add_their_parts(groups, tokens):
    parts = torch.randn(20, 2, tokens, COLUMNS).bfloat16()
    parts[:, :, :, 5:40] = 0
    residual, weight = torch.randn(tokens, COLUMNS).bfloat16(), torch.randn(COLUMNS).bfloat16()
    runs = [layers(groups, rank, parts, residual, weight) for rank in range(2)]
    for device in DEVICES:
        poison = torch.full((1 << 22,), torch.nan, device=device)
        del poison
    check([run() for run in runs], parts, residual, weight)
    graphs, outputs = [], []
    for device, run in zip(DEVICES, runs, strict=True):
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):  # the default is the first GPU's stream
                outputs.append(run())
            graphs.append(graph)
    for _ in range(50):
        for pair in outputs:
            for tensor in pair:
                tensor.fill_(torch.nan)
        for device, graph in zip(DEVICES, graphs, strict=True):
            with torch.cuda.device(device):
                graph.replay()
        check(outputs, parts, residual, weight)
