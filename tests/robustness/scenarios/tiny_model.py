"""Write the tiny model, new and over an older one, with a small vocabulary and weights because it is made often."""

from robustness.scenario import BUSY, Scenario, write
from sparkforge.core import manifest
from sparkforge.core.errors import InputError
from sparkforge.core.files import sha256_file
from sparkforge.models import tiny
from sparkforge.models.tiny import Sizes, Tensor, Weights

SIZES = Sizes(hidden=32, intermediate=32, layers=2, experts=2, top_k=1, heads=1, kv_heads=1)


def _tensors():
    for number in range(4):
        yield f"t{number}", Tensor((5000,), "U8", bytes([number]) * 5000)


OLD = Weights(lambda: "old", lambda: SIZES, _tensors)
NEW = Weights(lambda: "new", lambda: SIZES, _tensors)


def _prepare(work):
    tiny.tokenizer_files = lambda: {"tokenizer.json": b"{}" * 10_000, "tokenizer_config.json": b"{}"}
    tiny.write_tiny(work / "state/models/tiny", OLD)
    write(work / "state/models/mine/mine.txt", "mine")


def _prepare_none(work):
    _prepare(work)
    for file in sorted((work / "state/models/tiny").iterdir()):
        file.unlink()


def _act(work):
    tiny.write_tiny(work / "state/models/tiny", NEW)
    folder = work / "state/models/tiny"
    record = manifest.load(folder)
    if not (record and record.inputs == {"recipe": "new"} and manifest.is_intact(record, folder)):
        raise InputError(f"{folder} is not whole", "a file of it cannot be read", "run it again", code="input.model")


def _judge(work):
    """If a folder has a manifest, every listed file is absent or has the listed content."""
    folder = work / "state/models/tiny"
    if record := manifest.load(folder):
        for name, sha256 in record.outputs.items():
            assert not (folder / name).exists() or sha256_file(folder / name) == sha256, name


SCENARIOS = [
    Scenario("tiny-replaced", _prepare, _act, _judge, volatile=("*.manifest.json",), races=(0, BUSY)),
    Scenario("tiny", _prepare_none, _act, _judge, volatile=("*.manifest.json",), races=(0, BUSY)),
]
