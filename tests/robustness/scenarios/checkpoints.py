"""Fetch a small gpt-oss checkpoint: from a folder, from a hub on loopback, and over a damaged copy."""

import json
import os
import runpy
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

from robustness.scenario import BUSY, Scenario, serving, sha256, write
from sparkforge.core.paths import ROOT
from sparkforge.models import hub
from sparkforge.models.hub_online import Hub
from sparkforge.models.hub_source import Mirror

NAME = "openai/gpt-oss-120b"
SHARD = "model-00001-of-00002.safetensors"


hub_server = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/unit/models/hub_server.py")))
FILES = hub_server.checkpoint(size=20_000)
READ = {name: data for name, data in FILES.items() if "/" not in name and name != "README.md"}


@contextmanager
def _hub(work):
    with serving(lambda: nullcontext(hub_server.HubServer(FILES))) as url:
        os.environ["HF_ENDPOINT"] = url
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            os.environ.pop(name, None)
        yield


def _target(work):
    return work / "models/gpt-oss-120b"


def _prepare_mirror(work):
    for name, data in READ.items():
        write(work / "mirror" / name, data)
    entries = {name: {"size": len(data), "sha256": sha256(data)} for name, data in READ.items()}
    note = {"schema": 1, "repository": NAME, "revision": hub_server.COMMIT, "files": entries}
    write(work / "mirror/sparkforge-model.json", json.dumps(note))
    write(work / "models/mine/mine.txt", "mine")


def _prepare_damaged(work):
    _prepare_mirror(work)
    hub.fetch_checkpoint(Mirror(work / "mirror", NAME, ""), _target(work))
    damaged = bytearray(READ[SHARD])
    damaged[-1] ^= 1
    write(_target(work) / SHARD, bytes(damaged))


def _prepare_hub(work):
    write(work / "models/mine/mine.txt", "mine")


def _from_mirror(work):
    hub.fetch_checkpoint(Mirror(work / "mirror", NAME, ""), _target(work))


def _from_hub(work):
    hub.fetch_checkpoint(Hub(NAME, hub_server.COMMIT), _target(work))


def _judge(work):
    """Every file in the checkpoint's folder and in the partial folder is complete, and the former has all files."""
    for folder in (_target(work), _target(work).with_name("gpt-oss-120b.partial")):
        for path in folder.glob("[!.]*"):
            if path.name in READ:
                assert path.read_bytes() == READ[path.name], path
    if _target(work).exists():
        assert {path.name for path in _target(work).iterdir()} >= READ.keys()


def _judge_damaged(work):
    """Every file is the old or the right file, and none is missing."""
    for name, data in READ.items():
        content = (_target(work) / name).read_bytes()
        assert content == data or (name == SHARD and content[:-1] == data[:-1]), name


def _healed(work):
    for name, data in READ.items():
        assert (_target(work) / name).read_bytes() == data


NOTE = ("models/gpt-oss-120b/sparkforge-model.json",)  # it has the path of the mirror
if "huggingface_hub" not in sys.modules:
    raise ImportError("the hub's library must be loaded before the runner forks")
SCENARIOS = [
    Scenario("hub-mirror", _prepare_mirror, _from_mirror, _judge, _healed, volatile=NOTE, races=(0, BUSY)),
    Scenario("hub-damaged", _prepare_damaged, _from_mirror, _judge_damaged, _healed, volatile=NOTE, races=(0, BUSY)),
    Scenario("hub", _prepare_hub, _from_hub, _judge, _healed, _hub, volatile=NOTE, races=(0, BUSY), cost=3.0),
]
