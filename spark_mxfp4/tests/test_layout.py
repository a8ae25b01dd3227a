"""The Hopper kernel's byte order: unpacking restores every byte; C++ and Python agree on structures and shapes."""

import ctypes
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cpu_kernels
from spark_mxfp4.experts import ExpertWeights, Projection
from spark_mxfp4.kernels import hopper, linear, router
from spark_mxfp4.kernels.check import random_weights
from spark_mxfp4.kernels.layout import CHUNK_BYTES, fits, pack, pack_projection, unpack, unpack_projection


def projection(experts, rows, columns):
    return Projection(
        torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8),
        torch.randint(0, 129, (experts, rows, columns // 32), dtype=torch.uint8),
        torch.randn(experts, rows),
    )


def same(first, second):
    return all(map(torch.equal, first, second))


@pytest.mark.needs("c++")
def test_the_compiler_lays_out_arguments_and_shapes_as_python_does(tmp_path):
    structures = (
        hopper.Routing, hopper.Ordering, hopper.Gemm, hopper.Input, hopper.Layer, router.Router, linear.Linear,
    )  # fmt: skip
    claims = [
        f"{'sizeof' if name is None else 'offsetof'}({', '.join(filter(None, (kind.__name__, name)))}) == {number}"
        for kind in structures
        for name, number in [
            (None, ctypes.sizeof(kind)), *((name, getattr(kind, name).offset) for name, _ in kind._fields_),
        ]
    ]  # fmt: skip
    for shape in (*hopper.GROUPED.values(), *hopper.LAYERS.values()):
        kind = f"Shape<{', '.join(map(str, shape))}>"
        claims += [f"{kind}::CHUNKS == {shape.chunks}", f"{kind}::GATHERS == {int(shape.gathers)}"]
        claims += [f"{kind}::W_BYTES == {shape.weight_bytes}"]
    headers = "".join(f'#include "{header}"\n' for header in ("warp.cuh", "arguments.cuh", "shapes.cuh"))
    text = "".join(f"static_assert({claim});\n" for claim in claims)
    (tmp_path / "claims.cpp").write_text(f"{headers}using namespace spark;\n{text}")
    cpu_kernels.shared_library(tmp_path, "claims.cpp")


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (128, 64), (192, 96), (320, 2880), (32, 160)])
def test_every_byte_comes_back(rows, columns, paired):
    stored = projection(3, rows, columns)
    packed = pack_projection(stored, paired=paired)
    assert packed.weight.shape[3] == CHUNK_BYTES
    assert packed.scales is None
    assert same(unpack_projection(packed, rows, columns, paired=paired), stored)
    layer = ExpertWeights(projection(2, 192, 160), projection(2, 160, 96))
    assert all(map(same, unpack(pack(layer), 160, 96), layer))


def test_scales_that_do_not_fit_and_dense_weights_are_refused():
    good = projection(1, 64, 64)
    for scale, fine in ((128, True), (129, False), (255, False)):
        good.scales[0, 3, 1] = scale
        assert fits(ExpertWeights(good, good)) is fine
    with pytest.raises(ValueError, match="a scale is above 2\\^1 or NaN"):
        pack_projection(good, paired=False)
    with pytest.raises(ValueError, match="takes MXFP4"):
        pack_projection(Projection(torch.zeros(1, 64, 64)), paired=False)


class Allocations(TorchDispatchMode):
    """Counts the bytes of live tensors that operators allocate, except those in `known`."""

    def __init__(self, known):
        super().__init__()
        self.live = self.peak = 0
        self.storages = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            self.live += size
            self.peak = max(self.peak, self.live)
            self.storages[key] = weakref.finalize(storage, self.end, key, size)

    def end(self, key, size):
        self.live -= size
        del self.storages[key]


def test_laying_a_layer_out_takes_little_more_than_the_result():
    layer = random_weights(32, 256, 256, "cpu")
    tensors = [tensor for projection in layer for tensor in projection]
    with Allocations(tensors) as allocations:
        result = pack(layer)
    packed = sum(tensor.nbytes for projection in result for tensor in projection if tensor is not None)
    assert packed <= allocations.peak < 1.06 * packed
