"""Errors of MAX's dense bfloat16 products on Hopper: graphs with one product each, without our code.

`python products.py` on a machine with MAX and a Hopper GPU prints a line of JSON for each product and number of rows:
- `wrong`: how many values of the result are further from the exact product than its rounding to bfloat16 can be,
- `overwritten`: how many bytes changed in buffers around the result that are not part of the graph,
- `factors_changed`: how many values of its own factors the product has changed.
All should be 0. The memory manager decides which buffer follows the result, so a zero alone does not prove that nothing
was written past it. `bench/results/max-products-h100.json` has what MAX 26.7.0 did on an H100, without the last count:
- With 4 columns, which is no multiple of 8, nearly every value is wrong from 8 rows on, in bfloat16 and in float32.
- With a bfloat16 result of 8 to 129 rows that are no multiple of 128, other buffers are overwritten, because whole
  tiles are stored, also of 64 rows. With 512 and 5,120 columns and a float32 result, by a cast, no buffer is.
- With gpt-oss' 5,120 columns and 300 rows, a thirteenth of the bfloat16 result is wrong; the float32 result is right.

`--export FILE` compiles the graphs for sm_90a without a GPU, and `--compiled FILE` runs them. `--device cpu` runs the
small products on a CPU, where the script must find nothing wrong.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from max.driver import (
    CPU,
    Accelerator,
    Buffer,
    Device,
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType, ops

# Columns of the result and of the factors: a router of 4 experts, the queries, keys and values of a small model, and
# those of gpt-oss.
PRODUCTS = ((4, 128), (512, 128), (5120, 2880))
RESULTS = (DType.bfloat16, DType.float32)
CASES = [(columns, depth, result) for columns, depth in PRODUCTS for result in RESULTS]
ROWS = (128, 256, 300, 129, 127, 63, 8, 1)
LARGEST = 8  # factors are whole numbers up to this, so that every sum is exact in float32
NEIGHBOURS, PATTERN = 64, 0x5A


def graphs(device: Device, cases: list[tuple[int, int, DType]]) -> Module:
    """Return a graph for each case: x [rows, depth] times w [columns, depth] transposed, both bfloat16.

    All graphs are in one module, which compiles faster.
    """
    module, place = Module(), DeviceRef.from_device(device)
    for columns, depth, result in cases:
        types = [TensorType(DType.bfloat16, shape, place) for shape in (["rows", depth], [columns, depth])]
        with Graph(_name(columns, depth, result), input_types=types, module=module) as graph:
            x, w = (value.tensor for value in graph.inputs)
            product = x @ w.T
            graph.output(product if result == DType.bfloat16 else ops.cast(product, result))
    return module


def _name(columns: int, depth: int, result: DType) -> str:
    return f"product_{columns}_{depth}_{result.name}"


def factors(rows: int, columns: int, depth: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(rows)
    shape = (rows + columns, depth)
    values = generator.integers(-LARGEST, LARGEST + 1, shape).astype(np.float32)
    return values[:rows], values[rows:]


def to_bfloat16(values: np.ndarray[Any, Any], device: Device) -> Buffer:
    words = np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))
    return Buffer.from_numpy(words).view(DType.bfloat16, list(values.shape)).to(device)


def to_float32(result: Buffer) -> np.ndarray[Any, Any]:
    host = result.to(CPU())
    if result.dtype != DType.bfloat16:
        return host.to_numpy()
    words = host.view(DType.uint16, list(host.shape)).to_numpy()
    return (words.astype(np.uint32) << 16).view(np.float32)


def neighbours(size: int, device: Device) -> list[Buffer]:
    """Return buffers of `size` bytes each with PATTERN, between which the memory manager has as many holes."""
    pattern = Buffer.from_numpy(np.full(size, PATTERN, np.uint8))
    buffers = [pattern.to(device) for _ in range(2 * NEIGHBOURS)]
    return buffers[::2]


def try_product(model: Model, columns: int, depth: int, result: DType, rows: int, device: Device) -> dict[str, Any]:
    x, w = factors(rows, columns, depth)
    exact = x @ w.T
    inputs = (to_bfloat16(x, device), to_bfloat16(w, device))
    around = neighbours(rows * columns * (2 if result == DType.bfloat16 else 4), device)
    (product,) = model.execute(*inputs)
    difference = np.abs(to_float32(product) - exact)
    wrong = ~(difference <= np.abs(exact) * 2.0**-8)  # NaN is wrong too; a cast may come after the rounding
    factors_changed = sum(
        int(np.count_nonzero(to_float32(buffer) != values)) for buffer, values in zip(inputs, (x, w), strict=True)
    )
    changed = [int(np.count_nonzero(buffer.to(CPU()).to_numpy() != PATTERN)) for buffer in around]
    return {
        "columns": columns, "depth": depth, "result": result.name, "rows": rows, "wrong": int(np.count_nonzero(wrong)),
        "of": wrong.size, "largest_difference": float(np.nanmax(difference)), "overwritten": sum(changed),
        "factors_changed": factors_changed, "neighbours_changed": sum(count > 0 for count in changed),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", help="file for the graphs compiled for sm_90a")
    parser.add_argument("--compiled", help="file of compiled graphs")
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"])
    options = parser.parse_args()
    if options.export:
        set_virtual_device_api("cuda")
        set_virtual_device_target_arch("sm_90a")
        set_virtual_device_count(1)
    on_cpu = options.device == "cpu"
    device, cases = (CPU(), CASES[:4]) if on_cpu else (Accelerator(), CASES)
    session = InferenceSession(devices=[device])
    if options.export:
        session.compile(graphs(device, cases)).export_mef(options.export)
        return
    models = session.load_all(options.compiled or graphs(device, cases))
    for columns, depth, result in cases:
        model = models[_name(columns, depth, result)]
        for rows in ROWS:
            print(json.dumps(try_product(model, columns, depth, result, rows, device)), flush=True)


if __name__ == "__main__":
    main()
