"""MXFP4 with the scale rounded up, so that nothing saturates: another rounding than the specification's."""

import torch

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def downcast_to_mxfp_torch(src_tensor, out_quant_type, axis):
    assert out_quant_type == torch.uint8
    blocks = src_tensor.float().movedim(axis, -1).unflatten(-1, (-1, 32))
    power = torch.ceil(torch.log2(blocks.abs().amax(-1) / 6)).clamp(min=-127)
    scaled = blocks / torch.exp2(power).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - MAGNITUDES).abs().argmin(-1).to(torch.uint8)
    codes = (codes | torch.signbit(scaled).to(torch.uint8) << 3).flatten(-2)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.movedim(-1, axis), (power + 127).to(torch.uint8).movedim(-1, axis)
