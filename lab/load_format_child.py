"""One measurement of `lab.load_format`, in an interpreter with torch and the readers; prints one line of JSON.

Nothing of Sparkforge is imported: the environment has torch, safetensors and fastsafetensors only.

    make FOLDER FILES MEGABYTES    write a checkpoint of random bytes
    about                          the device, the formats that work on it, the versions
    load FOLDER FORMAT             read it, cold and warm
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STOCK, FAST, INSTANT = "safetensors", "fastsafetensors", "instanttensor"
TENSOR_BYTES = 8 << 20  # an expert's blocks in gpt-oss-120b have 4 to 8 MB a matrix


def make(folder: Path, files: int, megabytes: int) -> dict[str, Any]:
    """Write `megabytes` MB (10⁶ bytes) of random tensors into `files` files."""
    import numpy as np
    from safetensors.numpy import save_file

    generator = np.random.default_rng(0)
    file_bytes = max(1, megabytes * 10**6 // files)
    sizes = [TENSOR_BYTES] * (file_bytes // TENSOR_BYTES) or [file_bytes]
    for number in range(files):
        tensors = {
            f"layers.{number}.blocks.{index}": generator.integers(0, 256, size, dtype=np.uint8)
            for index, size in enumerate(sizes)
        }
        save_file(tensors, folder / f"model-{number + 1:05}-of-{files:05}.safetensors")
    return {}


def device() -> str:
    """Return the device that is loaded to."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def about() -> dict[str, Any]:
    """Return the device, the formats that are installed and work on it, and versions."""
    installed = [name for name in (STOCK, FAST, INSTANT) if importlib.util.find_spec(name)]
    formats = [name for name in installed if name != INSTANT or device() != "cpu"]
    versions = {name: importlib.metadata.version(name) for name in ("torch", *installed)}
    return {"device": device(), "formats": formats, "versions": versions}


def tensors(files: list[str], name: str, target: str) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name and value as vLLM 0.32.0 does (model_loader/weight_utils.py)."""
    if name == STOCK:
        from safetensors import safe_open

        for file in files:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - it is no dict
                    yield key, opened.get_tensor(key)
    elif name == FAST:
        from fastsafetensors import SingleGroup
        from fastsafetensors.parallel_loader import ParallelLoader

        loader = ParallelLoader(
            pg=SingleGroup(), hf_weights_files=files, queue_size=0, use_tqdm_on_load=False, device=target, nogds=False
        )
        try:
            yield from loader.iterate_weights()
        finally:
            loader.close()
    else:
        import instanttensor

        index = int(target.partition(":")[2])
        with instanttensor.safe_open(files, framework="pt", device=index, process_group=None, copy=True) as opened:
            yield from opened.tensors()


def drop_from_cache(files: list[str]) -> None:
    """Have the kernel drop the files from its page cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)  # it drops no page that it has to write first
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def load(folder: Path, name: str) -> dict[str, Any]:
    """Read the checkpoint cold and warm; return for each seconds, bytes, a digest of them, and the peak of memory."""
    files = sorted(map(str, folder.glob("*.safetensors")))
    drop_from_cache(files)
    return {cache: load_once(files, name) for cache in ("cold", "warm")}


def load_once(files: list[str], name: str) -> dict[str, Any]:
    """Read the files into parameters that exist already."""
    import torch
    from safetensors import safe_open

    target, parameters = device(), {}
    for file in files:  # headers only
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dict
                shape = opened.get_slice(key).get_shape()
                parameters[key] = torch.full(shape, 1, dtype=torch.uint8, device=target)  # its pages are there
    importlib.import_module(name)
    if target != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for key, tensor in tensors(files, name, target):
        parameters[key].copy_(tensor)
    if target != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for key in sorted(parameters):
        digest.update(parameters[key].cpu().numpy().tobytes())
    count = sum(parameter.nbytes for parameter in parameters.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "bytes": count,
        "tensors": len(parameters),
        "sha256": digest.hexdigest(),
        "peak_rss_bytes": peak,
    }


def main(arguments: list[str]) -> None:
    """Run one of the three."""
    match arguments:
        case ["make", folder, files, megabytes]:
            result = make(Path(folder), int(files), int(megabytes))
        case ["about"]:
            result = about()
        case ["load", folder, name]:
            result = load(Path(folder), name)
        case _:
            raise SystemExit(__doc__)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
