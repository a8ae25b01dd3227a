from dataclasses import dataclass

import torch


@dataclass
class GatherIndx:
    src_indx: torch.Tensor
    dst_indx: torch.Tensor


class ScatterIndx(GatherIndx):
    pass


@dataclass
class RoutingData:
    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    n_expts_tot: int
    n_expts_act: int


def routing(logits, n_expts_act):
    values, experts = logits.topk(n_expts_act, dim=1)
    experts, order = experts.sort(dim=1)
    shares = values.softmax(dim=-1).gather(1, order).flatten()
    experts = experts.flatten()
    sources = torch.argsort(experts, stable=True)
    targets = torch.argsort(sources)
    counts = torch.bincount(experts, minlength=logits.shape[1])
    data = RoutingData(shares[sources], counts, logits.shape[1], n_expts_act)
    return data, GatherIndx(sources, targets), ScatterIndx(targets, sources)
