"""An order of bytes that differs from the checkpoint's, and whose shape does not tell the sizes."""

import torch


class StridedLayout:
    name = None

    def __init__(self, shape):
        self.initial_shape = shape

    def swizzle_data(self, data):
        return data

    def unswizzle_data(self, data):
        return data


class Backwards(StridedLayout):
    """[E, K/2, N]: experts and columns backwards, rows padded to a multiple of 48, nibbles swapped."""

    name = "BACKWARDS"

    def __init__(self, shape, mx_axis):
        super().__init__(shape)
        assert mx_axis == 1

    def swizzle_data(self, data):
        assert data.shape == torch.Size(self.initial_shape)
        padded = torch.nn.functional.pad(data, (0, -data.shape[-1] % 48))
        return ((padded >> 4) | (padded << 4)).flip(0, 1).contiguous()

    def unswizzle_data(self, data):
        return ((data >> 4) | (data << 4)).flip(0, 1)[..., : self.initial_shape[-1]]


def make_default_matmul_mxfp4_w_layout(mx_axis):
    return Backwards, {"mx_axis": mx_axis}
