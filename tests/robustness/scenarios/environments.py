"""Make a Python environment from a small lock of local wheels, over an older one, with the real uv."""

import os
import platform
import sys

from robustness.scenario import BUSY, Scenario, component, sha256, table, write
from robustness.scenarios import archives
from sparkforge import environments
from sparkforge.environments import Environment
from sparkforge.pins import locks
from sparkforge.sources import fetch

ENV = Environment("small")
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def wheel(name, tag="py3-none-any"):
    info = f"{name}-1.dist-info"
    files = {
        f"{name}/__init__.py": b"x = 1\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    return f"{name}-1-{tag}.whl", archives.wheel(info, files)


def _prepare(work):
    package, torch = wheel("thing"), wheel("torch", f"{TAG}-{TAG}-linux_{platform.machine()}")
    for name, data in (package, torch):
        write(work / "wheels" / name, data)
    write(work / "locks/small.txt", f"thing==1 --hash=sha256:{sha256(package[1])}\n")
    components = {"torch": component("torch", *torch, index="http://127.0.0.1:9"),
                  "vllm": component("thing", *package, provides="vllm==1+cpu")}  # fmt: skip
    environment = {"lock": "small", "wheels": ["s/vllm", "s/torch"], "project": True, "size": 1}
    os.environ |= {"UV_CACHE_DIR": str(work / "tmp/uv"), "UV_OFFLINE": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/",
                   "UV_LINK_MODE": "copy"}  # fmt: skip
    locks.uv_environment()  # asks pip for its configuration, once
    locks.LOCKS = work / "locks"
    locks.lock_path = lambda name: work / f"locks/{name}.txt"
    fetch.fetch_pinned = lambda _component, filename: work / "wheels" / filename
    environments._install_own = lambda *_: None  # this scenario does not install the checkout
    global TABLE  # noqa: PLW0603 - every run is forked from this process
    TABLE = table(components, environments={"small": environment})
    write(work / "state/envs/mine/mine.txt", "mine")
    write(ENV.path / "lib/old.py", "an older environment")


TABLE = None


def _act(work):
    environments.ensure(ENV, TABLE)


def _judge(work):
    """A complete environment has every file of its distributions."""
    if environments.stamp(ENV) == environments.inputs(ENV, TABLE):
        for record in ENV.site_packages.glob("*.dist-info/RECORD"):
            for row in record.read_text().splitlines():
                assert (ENV.site_packages / row.partition(",")[0]).exists(), row
        assert (ENV.site_packages / "thing/__init__.py").read_bytes() == b"x = 1\n"


SCENARIOS = [
    Scenario("environment", _prepare, _act, _judge, races=(0, BUSY), cost=30.0,
             volatile=("*.pyc", "*/uv_cache.json", "*/.lock", "*/RECORD", "*.manifest.json")),
]  # fmt: skip
