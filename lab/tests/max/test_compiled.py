"""The tiny model compiled for a GPU that is not here, and what its machine code stores.

MAX's products of bfloat16 on Hopper store whole tiles, rows behind the result too, unless a cast to float32 is joined
to them (spark_mxfp4/docs/max.md). Which they do can be read: a store that may be skipped has a branch around it.
"""

import os
import re
import subprocess

import pytest
import triton

from sparkforge.audit import elf
from sparkforge.models import tiny
from sparkforge.serve.devices import max_server
from sparkforge.serve.devices.max_server import MAX

pytestmark = [pytest.mark.integration, pytest.mark.timeout(max_server.START_SECONDS)]
NVDISASM = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "nvdisasm")  # noqa: PTH118, PTH120
CUBIN = b"\x7fELF\x02\x01\x01"
LARGEST = 1 << 20  # bytes of a kernel's cubin; here the largest has 130,224
NEAR = 80  # lines of SASS between a store and the branch around it
BRANCH = re.compile(r"@!?U?P\d.*\bBRA\b.*\((\.L_x_\d+)\)")


@pytest.fixture(scope="module")
def artifact(compiled, tmp_path_factory):
    """The decoder as MAX writes it for carrying to another machine; from the cache if it was compiled before."""
    folder = tmp_path_factory.mktemp("compiled")
    model = tiny.write_tiny(tmp_path_factory.mktemp("models") / "tiny-gpt-oss")
    command = [
        MAX.path.absolute() / "bin" / "max", "warm-cache", "--model-path", model, "--max-length", "512",
        "--custom-architectures", max_server.ARCHITECTURE, *max_server.DEVICES["gpu"], "--target", "cuda:sm_90a",
        "--export-mefs", folder,
    ]  # fmt: skip
    environment = {**os.environ, **max_server.variables(), "MODULAR_CACHE_DIR": str(compiled)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (file,) = folder.glob("gpt_oss-*.mef")
    return file


def kernels(artifact, folder):
    """Return kernel name → lines of SASS, of all cubins in a file."""
    data = artifact.read_bytes()
    disassembled = {}
    for match in re.finditer(re.escape(CUBIN), data):
        path = folder / "kernel.cubin"
        path.write_bytes(data[match.start() : match.start() + LARGEST])  # what follows an ELF file is no part of it
        if not elf.is_cubin(path):
            continue
        output = subprocess.run([NVDISASM, "-c", path], capture_output=True, text=True, check=True).stdout
        for name, text in re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", output, re.DOTALL | re.MULTILINE):
            disassembled[name] = text.splitlines()
    return disassembled


def unconditional_stores(lines):
    """Return how many stores to global memory neither have a predicate nor a branch around them."""
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith(".L_x_")}
    branches = [
        (number, labels.get(match[1], 0)) for number, line in enumerate(lines) if (match := BRANCH.search(line))
    ]
    stores = [number for number, line in enumerate(lines) if " STG." in line and not re.search(r"@!?P\d", line)]
    return sum(
        not any(store - NEAR < begin < store < end < store + NEAR for begin, end in branches) for store in stores
    )


def test_no_dense_product_stores_rows_that_are_not_there(artifact, tmp_path):
    products = {name: lines for name, lines in kernels(artifact, tmp_path).items() if "sm90_matmul" in name}
    assert len(products) > 10
    assert {name: count for name, lines in products.items() if (count := unconditional_stores(lines))} == {}
    assert not [name for name, lines in products.items() if any("UTMASTG" in line for line in lines)]
