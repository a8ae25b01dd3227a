from dataclasses import dataclass
from typing import Any

import torch

from .tensor import FP4

CALLS = []  # the module's name, once a product: which of two hubs ran
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([VALUES, -VALUES])


@dataclass(frozen=True)
class InFlexData:
    dtype: Any = None


@dataclass(frozen=True)
class FlexCtx:
    rhs_data: InFlexData = InFlexData()


@dataclass
class PrecisionConfig:
    weight_scale: Any = None
    flex_ctx: FlexCtx = FlexCtx()


@dataclass(frozen=True)
class FnSpecs:
    name: str
    fn: Any
    fn_arg_names: tuple


@dataclass(frozen=True)
class FusedActivation:
    specs: FnSpecs
    fn_args: tuple
    reduction_n: int


def matmul_ogs(  # noqa: PLR0917 (the real one's)
    x, w, bias, routing_data, gather_indx=None, scatter_indx=None, precision_config=None, gammas=None,
    fused_activation=None,
):  # fmt: skip
    CALLS.append(__name__)
    assert w.dtype == FP4
    assert bias.dtype == torch.float32
    scales = precision_config.weight_scale.storage.data
    packed = w.storage.layout.unswizzle_data(w.storage.data)  # [E, K/2, N]
    experts, columns, rows = w.shape
    assert (packed.shape, scales.shape) == ((experts, columns // 2, rows), (experts, columns // 32, rows))
    values = torch.stack([VALUES[(packed & 15).long()], VALUES[(packed >> 4).long()]], 2).flatten(1, 2)
    values *= torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
    k, outputs, start = routing_data.n_expts_act, [], 0
    for expert, count in enumerate(routing_data.expt_hist.tolist()):
        pairs = torch.arange(start, start + count)
        source = pairs if gather_indx is None else gather_indx.src_indx[pairs] // k
        output = x[source].float() @ values[expert] + bias[expert]
        outputs.append(output if gammas is None else output * gammas[pairs, None])
        start += count
    result = torch.cat(outputs)
    if fused_activation is not None:
        result = fused_activation.specs.fn(result, *fused_activation.fn_args)
    if scatter_indx is not None:
        result = result[scatter_indx.src_indx].unflatten(0, (-1, k)).sum(1)
    return result.to(x.dtype)
