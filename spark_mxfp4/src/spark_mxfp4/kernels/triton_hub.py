"""Experts on a kernels hub: a package with the API of OpenAI's triton_kernels, the original or a fork.

A name is `hub:PACKAGE`, `hub:FOLDER` or `hub:OWNER/NAME@VERSION`. The package has the API that transformers 5.19 calls
for MXFP4 (transformers/integrations/mxfp4.py) and that vLLM 0.32.0 ships (vllm/third_party/triton_kernels, of Triton
3.5.1): products by `matmul_ogs` with `FusedActivation`, `FnSpecs` and `swiglu_fn`, sorting by `routing`. Its own
`downcast_to_mxfp_torch` quantises weights, and its own layouts order them.
"""

from __future__ import annotations

import inspect
import sys
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from spark_mxfp4.experts import SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertWeights, Projection
from spark_mxfp4.imports import named_module
from spark_mxfp4.kernel import MoeKernel
from spark_mxfp4.kernels import hub
from spark_mxfp4.mxfp4 import BLOCK_BYTES

PREFIX = "hub:"
UNCHOSEN = -1e30  # logit of experts that a token did not choose; finite, because a hub fills its padding with -infinity


class HubCall(NamedTuple):
    """How we call a function or class of a hub: the number of positional arguments, and the keyword arguments."""

    positional: int
    keywords: tuple[str, ...] = ()


# The names that we use, by module of the hub; we do not call names with None. Names and arguments are those of Triton
# 3.5.1's triton_kernels.
REQUIRED: dict[str, dict[str, HubCall | None]] = {
    "matmul_ogs": {
        "matmul_ogs": HubCall(4, ("gather_indx", "scatter_indx", "precision_config", "gammas", "fused_activation")),
        "FusedActivation": HubCall(3),
        "FnSpecs": HubCall(3),
        "PrecisionConfig": HubCall(0, ("weight_scale",)),
    },
    "swiglu": {"swiglu_fn": None},
    "routing": {"routing": HubCall(2)},
    "tensor": {
        "FP4": None,
        "Storage": HubCall(2),
        "Tensor": HubCall(1, ("dtype", "shape")),
        "wrap_torch_tensor": HubCall(1, ("dtype",)),
        "convert_layout": HubCall(2),
    },
    "tensor_details.layout": {"make_default_matmul_mxfp4_w_layout": HubCall(0, ("mx_axis",))},
    "numerics_details.mxfp": {"downcast_to_mxfp_torch": HubCall(2, ("axis",))},
}


class TritonHubKernel(MoeKernel):
    """A hub's `matmul_ogs` as a kernel, called as transformers calls it.

    Prepared weights are in the hub's own layout of weights [E, K/2, N] and scales [E, K/32, N].
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._hub = load(name)

    def run(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See MoeKernel. Raises NotImplementedError for experts on other devices, which `routing` does not support.

        A hub routes by logits. The logit of a chosen expert is the logarithm of its share, so the hub's softmax returns
        the shares divided by their sum.
        """
        if expert_map is not None:
            raise NotImplementedError(
                f"kernel {self.name!r} cannot run · its routing knows no experts on other devices · "
                "use tensor parallelism instead of expert parallelism, or another kernel"
            )
        if topk_ids.numel() == 0:
            return torch.empty_like(x)
        ogs, shares = self._hub["matmul_ogs"], topk_weights.float()
        intermediate = weights.gate_up.bias.shape[1] // 2 if weights.gate_up.bias is not None else 0
        first, second = self._operand(weights.gate_up, x.shape[-1]), self._operand(weights.down, intermediate)
        logits = x.new_full((x.shape[0], first.bias.shape[0]), UNCHOSEN, dtype=torch.float32)
        logits.scatter_(1, topk_ids.long(), shares.clamp(min=torch.finfo(torch.float32).tiny).log())
        data, gather, scatter = self._hub["routing"].routing(logits, topk_ids.shape[1])
        specs = ogs.FnSpecs("swiglu", self._hub["swiglu"].swiglu_fn, ("alpha", "limit"))
        activation = ogs.FusedActivation(specs, (SWIGLU_ALPHA, SWIGLU_LIMIT), 2)
        hidden = ogs.matmul_ogs(
            x.contiguous(), first.values, first.bias, data,
            gather_indx=gather, precision_config=first.precision, fused_activation=activation,
        )  # fmt: skip
        output = ogs.matmul_ogs(
            hidden, second.values, second.bias, data,
            scatter_indx=scatter, precision_config=second.precision, gammas=data.gate_scal,
        )  # fmt: skip
        return (output.float() * shares.sum(-1, keepdim=True)).to(x.dtype)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Return packed `weights` in the hub's layout, with float32 biases; see MoeKernel."""
        return ExpertWeights(*map(self._laid_out, weights))

    def restore(self, prepared: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
        """Return the checkpoint's bytes; biases stay float32."""
        return ExpertWeights(
            self._restored(prepared.gate_up, 2 * intermediate, hidden),
            self._restored(prepared.down, hidden, intermediate),
        )

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return blocks and scales of `x` [..., K], rounded by the hub from bfloat16, as in transformers."""
        downcast = self._hub["numerics_details.mxfp"].downcast_to_mxfp_torch
        values, scales = downcast(x.to(torch.bfloat16), torch.uint8, axis=x.dim() - 1)
        return values.reshape(*scales.shape, BLOCK_BYTES), scales

    @cached_property
    def _layout(self) -> tuple[Any, dict[str, Any]]:
        """Return the hub's layout of weights for this device: the class, and its arguments after the shape."""
        layout: tuple[Any, dict[str, Any]] = self._hub["tensor_details.layout"].make_default_matmul_mxfp4_w_layout(
            mx_axis=1
        )
        return layout

    def _laid_out(self, projection: Projection) -> Projection:
        weight, scales, bias = projection
        if scales is None:
            raise ValueError(f"kernel {self.name!r} cannot lay out dense weights · quantize them first")
        tensor, (layout, options) = self._hub["tensor"], self._layout
        values = tensor.wrap_torch_tensor(weight.transpose(-2, -1), dtype=tensor.FP4)
        data = tensor.convert_layout(values, layout, **options).storage.data
        bias = weight.new_zeros(weight.shape[:2], dtype=torch.float32) if bias is None else bias.float()
        return Projection(data, scales.transpose(-2, -1), bias)

    def _restored(self, projection: Projection, rows: int, columns: int) -> Projection:
        weight, scales, bias = projection
        if scales is None:
            raise ValueError(f"kernel {self.name!r} cannot restore dense weights · pass what prepare returned")
        layout, options = self._layout
        values = layout((weight.shape[0], columns // 2, rows), **options).unswizzle_data(weight)
        return Projection(values.transpose(-2, -1).contiguous(), scales.transpose(-2, -1).contiguous(), bias)

    def _operand(self, projection: Projection, columns: int) -> Operand:
        """Return a projection of `columns` inputs as the hub's own objects; its data are not copied."""
        weight, scales, bias = projection
        if scales is None or bias is None:
            raise ValueError(f"kernel {self.name!r} cannot run · these weights are not prepared · call prepare first")
        tensor, (layout, options), (experts, rows) = self._hub["tensor"], self._layout, bias.shape
        storage = tensor.Storage(weight, layout((experts, columns // 2, rows), **options))
        values = tensor.Tensor(storage, dtype=tensor.FP4, shape=[experts, columns, rows])
        factors = tensor.wrap_torch_tensor(scales, dtype=torch.uint8)
        return Operand(values, self._hub["matmul_ogs"].PrecisionConfig(weight_scale=factors), bias)


class Operand(NamedTuple):
    """One projection for `matmul_ogs`: the hub's tensor, its precision with the scales, the bias [E, N]."""

    values: Any
    precision: Any
    bias: torch.Tensor


def name_of(package: ModuleType) -> str:
    """Return the kernel name for an imported hub. Raises ValueError if Python cannot import it by its name."""
    if sys.modules.get(package.__name__) is not package:
        raise ValueError(
            f"kernels hub {package.__name__} cannot be used · it is not the package that Python knows by this name · "
            "import it as a package, or pass its folder"
        )
    return PREFIX + package.__name__


def load(name: str) -> dict[str, ModuleType]:
    """Return the modules of the hub `name`, by REQUIRED's keys.

    Raises ValueError if the hub does not exist, cannot be imported, or lacks names of REQUIRED, which the error lists.
    """
    package = _package(name)
    modules, missing = dict[str, ModuleType](), list[str]()
    for path, names in REQUIRED.items():
        try:
            modules[path] = named_module(f"{package.__name__}.{path}")
        except ImportError as error:
            missing.append(f"{path} ({error})")
            continue
        for attribute, call in names.items():
            if not hasattr(modules[path], attribute):
                missing.append(f"{path}.{attribute}")
            elif call is not None and (problem := _refusal(getattr(modules[path], attribute), call)):
                missing.append(f"{path}.{attribute} ({problem})")
    if missing:
        raise ValueError(
            f"kernels hub {name!r} cannot be used · it lacks {', '.join(missing)} · "
            "take a hub like triton_kernels of Triton 3.5, which transformers 5.19 calls"
        )
    return modules


def _refusal(function: Any, call: HubCall) -> str | None:
    """Return why `function` does not take the arguments of `call`; None if it does, or its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return str(error)
    return None


def _package(name: str) -> ModuleType:
    """Return the package of a name that begins with PREFIX. Raises ValueError if it cannot be imported."""
    location = name.removeprefix(PREFIX)
    if "/" not in location:
        try:
            return named_module(location)
        # Importing kernels may raise any exception of their compiler or the GPU's driver.
        except Exception as error:
            raise ValueError(
                f"kernels hub {name!r} cannot be imported · {hub.first_line(error)} · "
                "check its name, and that Python finds it"
            ) from error
    folder = Path(location).expanduser()
    packages = [path for path in (folder, *sorted(folder.glob("*/"))) if (path / "matmul_ogs.py").is_file()]
    if not location.startswith(("/", "./", "../", "~")) or not packages:
        return hub.module(location)
    return _package_in(packages[0].absolute(), name)


def _package_in(folder: Path, name: str) -> ModuleType:
    """Import the package in `folder` by its own name, which triton_kernels' modules use to import each other."""
    try:
        package = named_module(folder.name, folder.parent)
    except Exception as error:
        raise ValueError(
            f"kernels hub {name!r} cannot be imported · {hub.first_line(error)} · check the package in {folder}"
        ) from error
    folders = [Path(path).resolve() for path in package.__path__]
    if folder.resolve() not in folders:
        raise ValueError(
            f"kernels hub {name!r} cannot be used · a package {folder.name!r} was imported from {folders[0]} before, "
            "and Python imports only one package of a name · use one of them in a process"
        )
    return package
