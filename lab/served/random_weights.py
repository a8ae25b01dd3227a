"""A vLLM load format, `random`: like `dummy`, but experts hold random MXFP4 and the router spreads tokens over them.

vLLM 0.32.0's `dummy` leaves packed experts at zero and makes all other weights tiny, so that the router's bias decides
and nearly every token goes to the same few experts (model_loader/weight_utils.py, initialize_single_dummy_weight). A
backend then reads a fraction of the bytes that a real model makes it read. Answers mean nothing here either.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from sparkforge.core.files import write_atomic

FORMAT, PLUGIN = "random", "bench_random"
SCALES = (116, 122)  # E8M0 bytes: powers of two from 2^-11 to below 2^-5, as in trained experts
ROUTER_DEVIATION = 0.03  # logits then have a deviation of 1.6 at 2880 channels: no expert is favoured for all tokens
SEED, SHARD = 1234, 1 << 20  # a tensor's number is below SHARD


def register() -> None:
    """Register the load format with vLLM; may be called any number of times, in every process."""
    from vllm.model_executor.model_loader import register_model_loader  # noqa: PLC0415 (only where vLLM runs)
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: PLC0415

    class RandomLoader(DummyModelLoader):
        """The dummy loader, followed by `fill`."""

        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            """Fill the parameters on their device, without copies."""
            super().load_weights(model, model_config)
            fill(model.named_parameters(), rank())

    register_model_loader(FORMAT)(RandomLoader)


def rank() -> int:
    """Return this process's rank among those that serve a model together; 0 if it is alone."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def fill(parameters: Iterable[tuple[str, torch.nn.Parameter]], shard: int = 0) -> None:
    """Set packed weights, scales, norms and routers to values that make a forward pass cost as much as a real one.

    Experts of each `shard` differ; norms and routers, of which each rank has a whole copy, are the same on all.
    """
    for index, (name, parameter) in enumerate(parameters):
        data = parameter.data
        generator = torch.Generator(data.device).manual_seed(SEED + index)
        if data.dtype == torch.uint8:
            generator.manual_seed(SEED + index + SHARD * shard)
            data.random_(*(SCALES if "scale" in name else (0, 256)), generator=generator)
        elif "norm" in name:
            data.fill_(1)
        elif name.endswith("router.weight"):
            data.normal_(0, ROUTER_DEVIATION, generator=generator)
        elif name.endswith("router.bias"):
            data.zero_()


def write_entry_point(folder: Path) -> Path:
    """Write a package's metadata that makes vLLM call `register` in each process, if `folder` is on PYTHONPATH.

    The metadata also names our plugin: without it, vLLM would accept `--quantization spark-mxfp4` but serve stock
    experts.
    """
    info = folder / "bench_random_weights-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    write_atomic(info / "METADATA", b"Metadata-Version: 2.1\nName: bench-random-weights\nVersion: 0\n")
    plugins = f"{PLUGIN} = {__name__}:register\nspark_mxfp4 = spark_mxfp4.vllm.plugin:register\n"
    write_atomic(info / "entry_points.txt", f"[vllm.general_plugins]\n{plugins}".encode())
    return folder
