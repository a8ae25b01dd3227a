"""Mixture-of-experts kernels by name; `SPARK_MXFP4_KERNEL` chooses one."""

from __future__ import annotations

import os

from spark_mxfp4.experts import moe
from spark_mxfp4.imports import named_module
from spark_mxfp4.kernel import FunctionKernel, MoeKernel, is_kernel_class
from spark_mxfp4.kernels import hub, triton_hub
from spark_mxfp4.mxfp4 import BLOCK

KERNEL_VARIABLE = "SPARK_MXFP4_KERNEL"
DEFAULT_KERNEL = "torch"
DEVICE_KERNELS = {"cuda": "triton"}  # torch's device type → kernel, where it is not DEFAULT_KERNEL
KERNELS = ("torch", "triton")
ALIGNMENTS = ("hidden_alignment", "intermediate_alignment")


def chosen_name(device: str = "cpu") -> str:
    """Return the kernel's name from SPARK_MXFP4_KERNEL, else the default of torch's device type `device`."""
    return os.environ.get(KERNEL_VARIABLE) or DEVICE_KERNELS.get(device, DEFAULT_KERNEL)


def load(name: str | None = None) -> MoeKernel:
    """Return the kernel called `name` (default: `chosen_name()`): one of KERNELS, or a user's own.

    The name of a user's kernel is `module:attribute`, or a folder or hub repository with a slash (see `kernels.hub`).
    Such a kernel is a subclass of MoeKernel, or a function with the arguments of `MoeKernel.run`. The prefix `hub:`
    loads a package, folder or repository with the interface of triton_kernels (see `kernels.triton_hub`).
    Raises ValueError for an unknown name, a module that cannot be imported, or an object that is not a kernel, and
    NotImplementedError for a kernel that this environment cannot run.
    """
    name = name or chosen_name()
    if name.startswith(triton_hub.PREFIX):
        return triton_hub.TritonHubKernel(name)
    if "/" in name:
        return _own_kernel(name, hub.find(name))
    if ":" in name:
        return _own_kernel(name, _attribute(name))
    if name == "torch":
        # No CUDA graphs: `moe` copies the numbers of the chosen experts to the host.
        return FunctionKernel(name, moe, cuda_graphs=False, activations=True)
    if name == "triton":
        try:
            from spark_mxfp4.kernels.gpu import GpuKernel  # noqa: PLC0415 (Triton is optional)
        except ImportError as error:
            raise NotImplementedError(
                f"kernel 'triton' cannot be used · {error} · install triton, or set {KERNEL_VARIABLE} to 'torch'"
            ) from error
        return GpuKernel(name)
    raise ValueError(
        f"there is no kernel {name!r} · the kernels are {', '.join(map(repr, KERNELS))}, 'module:attribute', "
        f"'./folder', 'owner/name@version' and 'hub:PACKAGE' · set {KERNEL_VARIABLE} to one"
    )


def _attribute(name: str) -> object:
    """Return the attribute called `module:attribute`; import the module."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(named_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(f"kernel {name!r} cannot be loaded · {error} · check the spelling, and PYTHONPATH") from error


def _own_kernel(name: str, value: object) -> MoeKernel:
    """Return a kernel made from a user's class or function."""
    if isinstance(value, type) and is_kernel_class(value):
        kernel: MoeKernel = value(name)
        for key in ALIGNMENTS:
            alignment = getattr(kernel, key)
            if not isinstance(alignment, int) or alignment <= 0 or alignment % BLOCK:
                raise ValueError(
                    f"kernel {name!r} cannot be used · its {key} is {alignment!r} · make it a multiple of {BLOCK}"
                )
        return kernel
    if isinstance(value, type) or not callable(value):
        kind = "another class" if isinstance(value, type) else f"a {type(value).__name__}"
        raise ValueError(f"kernel {name!r} cannot be used · it is {kind} · name a subclass of MoeKernel, or a function")  # noqa: TRY004 (the name is wrong)
    if attributes := sorted(
        {*ALIGNMENTS, "activations", "cuda_graphs", "prepare", "restore", "variant"} & set(dir(value))
    ):
        raise ValueError(
            f"kernel {name!r} cannot be used · it is a function with the attribute {attributes[0]!r} · "
            "make it a subclass of spark_mxfp4.kernel.MoeKernel, whose `run` is the function"
        )
    return FunctionKernel(name, value)
