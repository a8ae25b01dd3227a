from dataclasses import dataclass
from typing import Any

import torch

from .tensor_details.layout import StridedLayout

FP4 = "e2m1"


@dataclass
class Storage:
    data: torch.Tensor
    layout: Any = None

    def __post_init__(self):
        self.layout = self.layout or StridedLayout(self.data.shape)


@dataclass
class Tensor:
    storage: Storage
    dtype: Any = None
    shape: Any = None


def wrap_torch_tensor(torch_tensor, dtype=None):
    shape = list(torch_tensor.shape)
    if dtype == FP4:
        shape[torch_tensor.stride().index(1)] *= 2
    return Tensor(Storage(torch_tensor), dtype or torch_tensor.dtype, shape)


def convert_layout(tensor, layout_cls, **layout_kwargs):
    data = tensor.storage.layout.unswizzle_data(tensor.storage.data)
    layout = layout_cls(data.shape, **layout_kwargs)
    return Tensor(Storage(layout.swizzle_data(data), layout), tensor.dtype, tensor.shape)
